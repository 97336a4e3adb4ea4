#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
// Some parts serve several families of operators. That each is used is checked with all families.
#![cfg_attr(
    not(all(feature = "norm", feature = "gemm", feature = "recurrent")),
    allow(dead_code, unused_imports, unused_macros)
)]

pub mod amp;
pub mod autograd;
pub mod check;
pub mod cuda;
mod dispatch;
#[cfg(feature = "distributed")]
pub mod distributed;
mod error;
mod ffi;
#[cfg(feature = "jit")]
pub mod jit;
pub mod kernels;
pub mod library;
pub mod nn;
#[cfg(feature = "open")]
#[doc(hidden)]
pub mod open;
pub mod operator;
pub mod ops;
#[cfg(feature = "optim")]
pub mod optim;
mod overlap;
mod python;
mod state_dict;
pub mod strided;
pub mod testing;
#[cfg(feature = "train")]
pub mod train;
pub mod view;

pub use dispatch::kind_of;
pub use error::{Error, Result};
#[cfg(feature = "tvm_ffi")]
#[doc(inline)]
pub use library::tvm_ffi;
/// The tch crate whose tensors this crate's functions take.
pub use tch;

/// Runs the examples of docs/autograd.md as tests.
#[cfg(all(doctest, feature = "norm", feature = "recurrent"))]
#[doc = include_str!("../docs/autograd.md")]
mod autograd_page {}

/// Runs the examples of docs/porting.md as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/porting.md")]
mod porting_page {}

/// Runs the examples of docs/training.md as tests.
#[cfg(all(doctest, feature = "norm", feature = "gemm", feature = "optim", feature = "train"))]
#[doc = include_str!("../docs/training.md")]
mod training_page {}

/// Runs the examples of docs/kernels-from-elsewhere.md as tests.
#[cfg(all(doctest, feature = "tvm_ffi", feature = "norm"))]
#[doc = include_str!("../docs/kernels-from-elsewhere.md")]
mod elsewhere_page {}

/// Runs the examples of docs/distributed.md as tests.
#[cfg(all(doctest, feature = "distributed"))]
#[doc = include_str!("../docs/distributed.md")]
mod distributed_page {}
