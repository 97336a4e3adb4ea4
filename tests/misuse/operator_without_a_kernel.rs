// E0080: operators!: scale has nothing that computes its results
// Each call of it would be an error that says so only then.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;
    fn scale(x: &Tensor) -> Tensor {}
}

fn main() {}
