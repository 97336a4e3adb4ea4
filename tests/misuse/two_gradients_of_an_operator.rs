// error: operators!: square: `backward` does not go with `composite`
// A composite operator has the gradient of the operators that it calls.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;
    fn square(x: &Tensor) -> Tensor {
        composite = |x| Ok(x * x),
        backward = |_, grads| Ok(grads.get(0)?.shallow_clone().into()),
    }
}

fn main() {}
