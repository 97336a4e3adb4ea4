//! Calls functions that other projects export by the open ABI, TVM FFI: FlashInfer, CuTe DSL, TileLang
//! and kernels of Hugging Face's hub do.
//!
//! [`Module::load`] loads a library of such functions, and [`Module::function`] finds one. It is
//! called with tch's tensors, without a copy. Most functions write to tensors that the caller made,
//! and [`out`] marks these:
//!
//! ```no_run
//! use tch::{Device, Kind, Tensor};
//! use tch_extension::args;
//! use tch_extension::tvm_ffi::{Module, out};
//!
//! let rmsnorm = Module::load("libflashinfer_norm.so")?.function("rmsnorm")?;
//! let x = Tensor::randn([32, 4096], (Kind::BFloat16, Device::Cuda(0)));
//! let weight = Tensor::ones([4096], (Kind::BFloat16, Device::Cuda(0)));
//! let mut y = x.empty_like();
//! rmsnorm.call::<()>(args![out(&mut y), &x, &weight, 1e-6, false])?;
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! [`Function::with_backward`] gives the call a gradient.
//! [docs/kernels-from-elsewhere.md](https://github.com/tch-extension/tch-extension/blob/main/docs/kernels-from-elsewhere.md)
//! has recipes.
//!
//! # libtvm_ffi
//! The functions need the library libtvm_ffi, of which a process must have only one. The first call of
//! [`Module::load`] takes the one that the process has, or else the file that the variable
//! `TCH_EXTENSION_TVM_FFI` names, or else that of the package `apache-tvm-ffi` of `python3`:
//!
//! ```sh
//! pip install apache-tvm-ffi
//! ```
//!
//! Nothing of it is needed to compile or start a program. Versions 0.1.x are supported.
//!
//! # What a call does
//! - Tensors are passed as objects that a function may keep, with their strides as they are. Kinds are
//!   those that DLPack and libtorch share, with bf16, bool and fp8. Sparse, quantized and lazily
//!   conjugated tensors are refused. The memory of a tensor that a function keeps cannot be resized any
//!   more.
//! - The function runs on libtorch's current stream of the first tensor's GPU, which is the current
//!   device meanwhile. So it can be captured in a CUDA graph if its own code allows that.
//! - Tensors that it allocates come from libtorch's allocator.
//! - A tensor that is marked with [`out`] may be no memory of another argument and no expanded tensor,
//!   and its version counter is increased. The ABI does not say which arguments a function writes to,
//!   so one that is not marked is changed without notice to autograd. Nor does it say that a result is
//!   a view of an argument: its version counter is another one.
//! - A module stays loaded until the process ends, because tensors that it returned may need it.

mod function;
mod module;
pub(super) mod runtime;

pub use function::{Function, WithBackward};
pub use module::Module;
pub use runtime::version;

use crate::ffi::library as ffi;
use crate::library::Value;
use tch::Tensor;

/// An argument that a function writes to; [`out`] makes it.
pub struct Out<'a>(&'a mut Tensor);

/// Marks a tensor that a function of TVM FFI writes to. Its new values count as results of the call, for
/// autograd and for [`Function::with_backward`].
///
/// ```no_run
/// use tch::Tensor;
/// use tch_extension::args;
/// use tch_extension::tvm_ffi::{Module, out};
///
/// let add_one = Module::load("libadd_one.so")?.function("add_one")?;
/// let x = Tensor::from_slice(&[1.0_f32, 2.0]);
/// let mut y = x.empty_like();
/// add_one.call::<()>(args![&x, out(&mut y)])?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub fn out(tensor: &mut Tensor) -> Out<'_> {
    Out(tensor)
}

impl<'a> From<Out<'a>> for Value<'a> {
    fn from(out: Out<'a>) -> Self {
        Value(ffi::Value::written(out.0))
    }
}
