// error: operators!: square: `cpu` does not go with `composite`
// A composite operator is the same on each device. Its kernel would have no gradient.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;

    fn square(x: &Tensor) -> Tensor {
        composite = |x| Ok(x * x),
        cpu = |x| Ok(x * x),
    }
}

fn main() {}
