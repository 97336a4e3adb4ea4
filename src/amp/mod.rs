//! Mixed precision: [`Autocast`] is `torch.autocast`, [`GradScaler`] is `torch.amp.GradScaler`.
//!
//! Keep the weights in [`Kind::Float`](tch::Kind::Float). Inside an [`Autocast`] region, libtorch
//! casts the inputs of each operation according to its lists for the device: matrix products run in
//! the half kind, losses in `Float`. Gradients are often too small for
//! [`Kind::Half`](tch::Kind::Half), so the loss is scaled up before the backward pass, and the
//! gradients are scaled down after it. With [`Kind::BFloat16`](tch::Kind::BFloat16) that is not
//! needed.
//!
//! ```
//! use tch::nn::{self, Module, OptimizerConfig};
//! use tch::{Device, Kind, Tensor};
//! use tch_extension::amp::{Autocast, GradScaler};
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut optimizer = nn::Sgd::default().build(&vs, 0.1)?;
//! let mut scaler = GradScaler::new(Default::default())?;
//!
//! let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
//! for _ in 0..3 {
//!     optimizer.zero_grad();
//!     let loss = {
//!         let _autocast = Autocast::new(Device::Cpu, Kind::BFloat16)?;
//!         model.forward(&x).mse_loss(&x.narrow(1, 0, 1), tch::Reduction::Mean)
//!     };
//!     scaler.scale(&loss)?.backward(); // outside of the region
//!     scaler.unscale(&optimizer)?; // only because of the next line: `step` does it otherwise
//!     optimizer.clip_grad_norm(1.0);
//!     scaler.step(&mut optimizer)?;
//!     scaler.update()?;
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod autocast;
mod cast;
mod grad_scaler;

pub use autocast::Autocast;
pub use cast::{CastPolicy, autocast_inputs};
pub use grad_scaler::{GradScaler, GradScalerOptions, GradScalerState, Optimizer, ScaledGradients};
