// error: kernels!: Forward { x, .. }: expected the name of each field
//! The compiler proposes `..` where a field is left out.

use tch_extension::strided::{Strided, StridedMut};

#[repr(C)]
struct Forward<'a> {
    x: Strided<'a, 1>,
    y: StridedMut<'a, 1>,
    cap: f64,
}

tch_extension::kernels! {
    // SAFETY: nobody calls it.
    "misuse":
    unsafe fn forward(Forward { x, .. }) = misuse_forward_cpu, misuse_forward_cuda;
}

fn main() {}
