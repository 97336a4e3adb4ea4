// E0597: does not live long enough
// The struct holds an address and does not keep the tensor alive.
use tch_extension::strided::Strided;
use tch_extension::tch::Tensor;

fn main() {
    let strided = {
        let x = Tensor::from_slice(&[1.0]);
        Strided::<1>::new(&x)
    };
    drop(strided.expect("a strided"));
}
