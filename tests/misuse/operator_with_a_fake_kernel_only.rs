// E0080: operators!: scale has nothing that computes its results
// Each call of it would be an error that says so only then.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;
    fn scale(x: &Tensor) -> Tensor {
        fake = |x| Ok(x.shallow_clone()),
        key("AutocastCPU") = |x| Ok(x.shallow_clone()),
        backward = |_ctx, grads| Ok(grads.get(0)?.shallow_clone().into()),
    }
}

fn main() {}
