// E0277: is no type of an argument in `operators!`
// Schemas have no type for it.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;
    fn scale(x: &Tensor, by: u8) -> Tensor { cpu = |x, _by| Ok(x * 1.0) }
}

fn main() {}
