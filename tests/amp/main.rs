//! Tests of mixed precision: `Autocast` and `GradScaler`.

use std::io::Write;
use std::sync::{Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};
use tch_extension::amp::*;
use tch_extension::{Error, Result};

mod autocast;
mod checkpoint;
mod function;
mod grad_scaler;
mod operators;
mod trace;
mod training;

/// Lets only one test run at a time. All threads share one autocast cache, and the end of a region
/// in any of them clears it. Captures also fail while other threads use the GPU.
fn alone() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn skip(test: &str, why: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
}

fn random(shape: &[i64], device: Device) -> Tensor {
    Tensor::randn(shape, (Kind::Float, Device::Cpu)).to_device(device)
}

fn weight(shape: &[i64], device: Device) -> Tensor {
    random(shape, device).set_requires_grad(true)
}
