//! Mixed precision: [`Autocast`] is `torch.autocast`.
//!
//! The weights stay in [`Kind::Float`](tch::Kind::Float). Inside an [`Autocast`] libtorch casts for each
//! operation as its lists for the device say: matrix products run in the half kind, sums and losses in `Float`.

mod autocast;

pub use autocast::Autocast;
