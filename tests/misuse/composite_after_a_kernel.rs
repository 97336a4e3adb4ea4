// error: operators!: square: `composite` is the whole operator
// A composite operator is the same on each device. Its kernel would have no gradient.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;

    fn square(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x * x),
        composite = |x| Ok(x * x),
    }
}

fn main() {}
