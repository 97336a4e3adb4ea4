// E0599: no variant
// `save` names an argument that the operator does not have.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;
    fn scale(x: &Tensor) -> Tensor {
        cpu = |x| Ok(x * 1.0),
        backward = |_, grads| Ok(grads.get(0)?.shallow_clone().into()),
        save = [y],
    }
}

fn main() {}
