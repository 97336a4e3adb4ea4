// E0597: does not live long enough
use tch_extension::tch::Tensor;
use tch_extension::view::view;

fn main() {
    let values = {
        let x = Tensor::from_slice(&[1.0]);
        view::<f64, 1>(&x)
    };
    drop(values.expect("a view"));
}
