// E0308: expected fn pointer
// The compiler compares a kernel with the operator's signature.
use tch_extension::Result;
use tch_extension::tch::Tensor;

fn scale(x: &Tensor, by: i64) -> Result<Tensor> {
    Ok(x * by)
}

tch_extension::operators! {
    namespace misuse;
    fn scale(x: &Tensor, by: f64) -> Tensor { cpu = scale }
}

fn main() {}
