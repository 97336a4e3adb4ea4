// E0435: non-constant value
// libtorch keeps kernels until after the end of main, so they hold no values.
use tch_extension::tch::Tensor;

fn main() {
    let by = 2.0;
    tch_extension::operators! {
        namespace misuse;
        fn scale(x: &Tensor) -> Tensor { cpu = |x| Ok(x * by) }
    }
}
