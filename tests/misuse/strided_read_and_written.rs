// E0502: cannot borrow `x` as mutable
// Whoever reads and writes one tensor in a kernel must say so.
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::tch::Tensor;

fn main() {
    let mut x = Tensor::from_slice(&[1.0]);
    let read = Strided::<1>::new(&x);
    let written = StridedMut::<1>::new(&mut x);
    drop((read.expect("read"), written.expect("written")));
}
