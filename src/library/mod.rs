//! Calls any operator that is registered with libtorch's dispatcher, as `torch.ops` and
//! `torch.ops.load_library` do in Python, and registers operators that are written in Rust.
//!
//! [`Library::load`] loads a shared library that registers operators (`TORCH_LIBRARY`), whoever
//! wrote it. [`Operator::find`] finds one of its operators, or one of libtorch's own operators that
//! tch lacks or binds wrongly:
//!
//! ```
//! use tch::{Device, Kind, Tensor};
//! use tch_extension::args;
//! use tch_extension::library::Operator;
//!
//! let norm = Operator::find("aten::_foreach_norm.Scalar")?;
//! let (x, y) = (Tensor::from_slice(&[3.0, 4.0]), Tensor::from_slice(&[5.0, 12.0]));
//! let norms: Vec<Tensor> = norm.call(args![&[&x, &y], 2])?;
//! assert_eq!(norms, [Tensor::from(5.0), Tensor::from(13.0)]);
//!
//! // relu or gelu(bias + x @ w), in one kernel where there is one; arguments can be given by name.
//! let fused = Operator::find("aten::_addmm_activation")?;
//! let (x, w) = (Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::ones([3, 4], (Kind::Float, Device::Cpu)));
//! let bias = Tensor::full([4], -1.0, (Kind::Float, Device::Cpu));
//! let y: Tensor = fused.call(args![&bias, &x, &w, use_gelu = false])?;
//! assert_eq!(y, Tensor::full([2, 4], 2.0, (Kind::Float, Device::Cpu)));
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! The other way round, [`operators!`](crate::operators) defines operators in Rust, for Python,
//! `torch.compile`, TorchScript, C++ and whoever else knows libtorch's dispatcher. [`define`] and
//! [`implement`] do the same without the macro.
//!
//! A call runs with the grad mode and the autocast settings of its thread. [`Operator::call`]
//! describes what happens if an operator has no gradient.

mod define;
mod distribution;
mod kernels;
mod load;
#[cfg(feature = "tvm_ffi")]
mod load_kernel;
mod mismatch;
mod near;
mod operator;
mod operators;
mod output;
mod package;
mod requirements;
mod schema;
mod sym_int;
// It is documented where it is exported, at the crate's root.
#[cfg(feature = "tvm_ffi")]
#[doc(hidden)]
pub mod tvm_ffi;
mod value;
mod with_backward;

pub use crate::args;
pub use crate::ffi::library::{Layout, MemoryFormat, Output};
pub use define::{Kernel, below_autograd, define, implement, is_traced, without_key};
pub use load::{Library, LoadOptions};
#[cfg(feature = "tvm_ffi")]
pub use load_kernel::{LoadedKernel, load_kernel, load_kernel_for};
pub use operator::Operator;
#[doc(hidden)]
pub use operators::expansion;
pub use operators::registration_error;
pub use output::{FromOutput, FromOutputs, Outputs};
pub use package::{Package, PackageOptions};
pub use sym_int::{SymInt, empty, new_empty, sizes};
pub use value::{Args, NONE, Value};
pub use with_backward::{CallContext, WithBackward};

use crate::Result;

/// The version of the libtorch that this crate was compiled with. It runs with this one, or with one
/// that differs in the last number.
///
/// ```
/// let version = tch_extension::library::libtorch_version();
/// assert!(["2.11.0", "2.13.0"].contains(&version.as_str()));
/// ```
pub fn libtorch_version() -> String {
    crate::ffi::loader::libtorch_version()
}

/// The names of all operators in a namespace such as `aten`, with their overloads, sorted.
/// [`Operator::find`] takes these names.
///
/// ```
/// let names = tch_extension::library::operators("aten")?;
/// assert!(names.iter().any(|name| name == "aten::add.Tensor"));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// An error of libtorch.
pub fn operators(namespace: &str) -> Result<Vec<String>> {
    let mut names = all_operators()?;
    names.retain(|name| name.split_once("::").is_some_and(|(found, _)| found == namespace));
    Ok(names)
}

/// The names of all operators, sorted.
fn all_operators() -> Result<Vec<String>> {
    let text = crate::ffi::library::operator_names()?;
    let mut names: Vec<String> = text.lines().map(String::from).collect();
    names.sort_unstable();
    Ok(names)
}
