// E0027: pattern does not mention field `y`
//! A tensor that the pattern leaves out could be on another device than the kernel. The compiler
//! must say so of the user's own line, and not of the macro.

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
    unsafe fn forward(Forward { x, cap }) = misuse_forward_cpu, misuse_forward_cuda;
}

fn main() {}
