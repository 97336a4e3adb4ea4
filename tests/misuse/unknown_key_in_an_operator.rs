// error: operators!: scale: `gpu`: expected one each of
// A kernel for a device that the macro does not know.
use tch_extension::tch::Tensor;

tch_extension::operators! {
    namespace misuse;
    fn scale(x: &Tensor) -> Tensor { gpu = |x| Ok(x * 1.0) }
}

fn main() {}
