//! Tests of `optim`: against torch's formulas in plain tch operations, in every kind and on every
//! device, and of everything that a step must not do.

mod clipping;
mod cuda;
mod errors;
mod groups;
mod masters;
mod muon;
mod muon_batches;
mod muon_in_half;
mod reference;
mod scaler;
mod state_dict;
mod updates;

use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_extension::optim::{AdamW, FusedOptimizer, NamedTensor, OptimizerConfig, Sgd};

/// Lets only one test run at a time, because captures fail while other threads use the GPU.
fn serially() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

const CPU: Device = Device::Cpu;

/// Sizes around those of vectors and chunks, an empty one, and one without dimensions.
const SIZES: [&[i64]; 10] =
    [&[], &[0], &[1], &[7], &[3, 5], &[64], &[33, 31], &[1024], &[8193], &[130, 127]];

fn normal(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(size, (Kind::Double, CPU)).to_kind(kind).to_device(device)
}

fn leaves(sizes: &[&[i64]], kind: Kind, device: Device) -> Vec<Tensor> {
    sizes.iter().map(|size| normal(size, kind, device).set_requires_grad(true)).collect()
}

fn named(tensors: &[Tensor]) -> Vec<NamedTensor> {
    let tensors = tensors.iter().enumerate();
    let named = |(index, tensor): (usize, &Tensor)| NamedTensor {
        name: format!("w{index}"),
        tensor: tensor.shallow_clone(),
        group: 0,
    };
    tensors.map(named).collect()
}

/// Gives each leaf a new gradient with normal values of this size.
fn accumulate(leaves: &[Tensor], scale: f64) {
    for leaf in leaves {
        leaf.shallow_clone().zero_grad();
        let gradient = normal(&leaf.size(), leaf.kind(), leaf.device()) * scale;
        (leaf * gradient).sum(leaf.kind()).backward();
    }
}

fn text<T>(result: tch_extension::Result<T>) -> String {
    result.map(drop).expect_err("an error").to_string()
}

/// The bits of tensors, so that NaN equals NaN.
fn bits(tensors: &[Tensor]) -> Vec<Vec<u8>> {
    let bytes = |tensor: &Tensor| {
        let tensor = tensor.detach().to_device(CPU).contiguous();
        let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
        tensor.copy_data_u8(&mut bytes, tensor.numel());
        bytes
    };
    tensors.iter().map(bytes).collect()
}

fn gradients(leaves: &[Tensor]) -> Vec<Tensor> {
    leaves.iter().map(Tensor::grad).collect()
}

fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.detach().copy()).collect()
}
