//! Mixed precision.

use std::sync::{Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};
use tch_extension::amp::*;
use tch_extension::{Error, Result};

mod autocast;
mod checkpoint;

/// Threads have one autocast cache in common, and whoever leaves a region clears it for all. Nor do captures go
/// together with other threads' work on the GPU.
fn alone() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn random(shape: &[i64], device: Device) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_device(device)
}

fn weight(shape: &[i64], device: Device) -> Tensor {
    random(shape, device).set_requires_grad(true)
}
