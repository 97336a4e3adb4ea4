// E0502: cannot borrow `x` as mutable
// A tensor that a kernel both reads and writes must be passed only as a `StridedMut`.
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::tch::Tensor;

fn main() {
    let mut x = Tensor::from_slice(&[1.0]);
    let read = Strided::<1>::new(&x);
    let written = StridedMut::<1>::new(&mut x);
    drop((read.expect("read"), written.expect("written")));
}
