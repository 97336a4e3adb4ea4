//! Optimizers that update all parameters at once: [`AdamW`], [`Sgd`] and [`Muon`].
//!
//! They have the names of tch's, or of PyTorch's for `Muon`, and tch's functions. What can fail returns a `Result`, so a step costs a `?`:
//!
//! ```
//! # let vs = tch::nn::VarStore::new(tch::Device::Cpu);
//! # let w = vs.root().zeros("w", &[2]);
//! use tch_extension::optim::{AdamW, OptimizerConfig}; // instead of: use tch::nn::{AdamW, OptimizerConfig};
//!
//! let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
//! optimizer.backward_step(&(&w - 1.0).square().sum(tch::Kind::Float))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Compared with tch's, which are libtorch's C++ optimizers:
//!
//! - A step of up to 368 parameters is two kernels instead of a dozen per parameter. `Muon` takes some
//!   more for each shape of a matrix.
//! - A step can be captured in a [`cuda::Graph`](crate::cuda::Graph). tch's would write the bias
//!   correction of one step, and the learning rate, into the graph for ever.
//! - Gradients are clipped by their norm while parameters are updated
//!   ([`FusedOptimizer::set_clip_norm`]), and nothing waits for the GPU.
//! - Parameters of a half kind have master weights in `Float`.
//! - [`GradScaler::step`](crate::amp::GradScaler::step) does not wait for the GPU, which itself
//!   skips a step with infinite gradients.
//! - Bad input is an error, and leaves parameters as they were.
//!
//! [`schedule`] has learning rates as functions of the step. [`FusedOptimizer::save`] and
//! [`FusedOptimizer::load`] keep the state in files, and [`FusedOptimizer::load_torch`] reads PyTorch's.

mod clip;
mod config;
mod gradients;
mod kernels;
mod muon;
mod numbers;
mod optimizer;
mod orthogonal;
mod plan;
pub mod schedule;
#[cfg(feature = "distributed")]
pub(crate) mod shard;
mod state;
mod state_dict;
mod step;

pub use crate::amp::Optimizer;
pub use config::{AdamW, OptimizerConfig, Sgd, adamw, sgd};
pub use muon::{AdjustLr, Muon};
pub use optimizer::{FusedOptimizer, NamedTensor};
#[doc(hidden)]
pub use orthogonal::symmetric_product;
