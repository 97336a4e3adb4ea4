//! Optimizers that update all parameters at once: [`AdamW`] and [`Sgd`].
//!
//! They have the names and functions of tch's, so that one line changes:
//!
//! ```
//! use tch_extension::optim::{AdamW, Optimizer, OptimizerConfig};
//! // instead of: use tch::nn::{AdamW, Optimizer, OptimizerConfig};
//! ```
//!
//! Compared with tch's, which are libtorch's C++ optimizers:
//!
//! - A step of up to 368 parameters is two kernels instead of a dozen per parameter.
//! - A step can be captured in a [`cuda::Graph`](crate::cuda::Graph). tch's would write the bias
//!   correction of one step, and the learning rate, into the graph for ever.
//! - Gradients are clipped by their norm while parameters are updated
//!   ([`Optimizer::set_clip_norm`]), and nothing waits for the GPU.
//! - Parameters of a half kind have master weights in `Float`.
//! - [`GradScaler::step`](crate::amp::GradScaler::step) does not wait for the GPU, which itself
//!   skips a step with infinite gradients.
//! - Bad input is an error of the functions with `f_`, and leaves parameters as they were.
//!
//! [`schedule`] has learning rates as functions of the step. [`Optimizer::save`] and
//! [`Optimizer::load`] keep the state in files, and [`Optimizer::load_torch`] reads PyTorch's.

mod config;
mod gradients;
mod kernels;
mod numbers;
mod optimizer;
mod plan;
pub mod schedule;
#[cfg(feature = "distributed")]
pub(crate) mod shard;
mod state;
mod state_dict;
mod step;

pub use config::{AdamW, OptimizerConfig, Sgd, adamw, sgd};
pub use optimizer::{NamedTensor, Optimizer};
