//! Tests of `ShardedOptimizer`, with ranks as threads: against an ordinary optimizer that gets the
//! mean of all gradients.

mod cuda;
mod errors;
mod gradients;
mod processes;
mod state;
mod steps;

pub use processes::CASES;

use tch::{Device, Kind, Tensor};
use tch_extension::distributed::{
    GroupOptions, ProcessGroup, ShardedOptimizer, ShardedOptions, Store,
};
use tch_extension::optim::{AdamW, FusedOptimizer, NamedTensor, OptimizerConfig, Sgd};
use tch_extension::{Error, Result};

const CPU: Device = Device::Cpu;

/// Sizes that no number of ranks divides, with an empty parameter and one without dimensions.
const SIZES: [&[i64]; 8] = [&[37, 19], &[19], &[], &[5], &[0], &[64, 3], &[1000], &[130, 127]];

/// Several buckets for these sizes.
fn small_buckets() -> ShardedOptions {
    ShardedOptions { bucket_mb: 0.004, first_bucket_mb: 0.001, ..Default::default() }
}

/// Values that depend on these numbers only: threads share libtorch's random numbers.
fn values(size: &[i64], seed: f64, kind: Kind, device: Device) -> Tensor {
    let len: i64 = size.iter().product();
    let steps = Tensor::arange(len, (Kind::Double, device));
    ((steps * 0.7311 + seed * 1.37).sin() * 1.3).reshape(size).to_kind(kind)
}

/// The parameters of a model, of which every second one is in group 1.
fn model(sizes: &[&[i64]], kind: Kind, device: Device) -> Vec<Tensor> {
    let leaf = |(place, size): (usize, &&[i64])| {
        values(size, place as f64, kind, device).set_requires_grad(true)
    };
    sizes.iter().enumerate().map(leaf).collect()
}

fn named(leaves: &[Tensor]) -> Vec<NamedTensor> {
    let named = |(place, leaf): (usize, &Tensor)| NamedTensor {
        name: format!("w{place}"),
        tensor: leaf.shallow_clone(),
        group: place % 2,
    };
    leaves.iter().enumerate().map(named).collect()
}

/// A loss whose gradient depends on the weights, on the step and on the rank.
fn loss(leaves: &[Tensor], rank: usize, step: usize) -> Tensor {
    let of = |(place, leaf): (usize, &Tensor)| {
        let seed = (100 * rank + 10 * step + place) as f64;
        let data = values(&leaf.size(), seed, leaf.kind(), leaf.device());
        ((leaf * 0.5 + data) * leaf).sum(Kind::Float)
    };
    leaves
        .iter()
        .enumerate()
        .map(of)
        .fold(Tensor::from(0.0_f32).to_device(leaves[0].device()), |sum, loss| sum + loss)
}

/// What an ordinary optimizer makes of the mean of all ranks' gradients.
fn reference(
    leaves: &[Tensor],
    optimizer: &mut FusedOptimizer,
    ranks: usize,
    steps: std::ops::Range<usize>,
) {
    for step in steps {
        let mut means: Vec<Option<Tensor>> = leaves.iter().map(|_| None).collect();
        for rank in 0..ranks {
            optimizer.zero_grad().expect("no error");
            loss(leaves, rank, step).backward();
            for (mean, leaf) in means.iter_mut().zip(leaves) {
                let part = leaf.grad() * (1.0 / ranks as f64);
                *mean = Some(match mean.take() {
                    Some(mean) => mean + part,
                    None => part,
                });
            }
        }
        let means: Vec<Option<&Tensor>> = means.iter().map(Option::as_ref).collect();
        optimizer.step_with(&means).expect("a step");
    }
}

/// The same steps with a rank's own gradients.
fn train(
    leaves: &[Tensor],
    optimizer: &mut ShardedOptimizer,
    steps: std::ops::Range<usize>,
) -> Result<()> {
    let rank = optimizer.group().rank();
    for step in steps {
        loss(leaves, rank, step).f_backward()?;
        optimizer.step()?;
    }
    Ok(())
}

fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.detach().copy()).collect()
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

fn worst(left: &[Tensor], right: &[Tensor]) -> f64 {
    let difference = |(left, right): (&Tensor, &Tensor)| {
        let difference = left.to_kind(Kind::Double) - right.to_kind(Kind::Double);
        if difference.numel() == 0 { 0.0 } else { difference.abs().max().double_value(&[]) }
    };
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(difference).fold(0.0, f64::max)
}

/// Runs ranks as threads with a short timeout, and returns the outcome of each.
fn outcomes<T: Send>(
    ranks: usize,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Vec<std::result::Result<T, String>> {
    let timeout = std::time::Duration::from_secs(8);
    let store = Store::hash(timeout).expect("a store");
    std::thread::scope(|scope| {
        let one = |rank: usize| {
            let (store, run) = (&store, &run);
            scope.spawn(move || {
                let options = GroupOptions::with_timeout(timeout);
                let group = ProcessGroup::with_store(store, rank, ranks, &options);
                group.and_then(|group| {
                    let outcome = run(group.clone());
                    if let Err(error) = &outcome {
                        group.poison(&error.to_string());
                    }
                    outcome
                })
            })
        };
        let threads: Vec<_> = (0..ranks).map(one).collect();
        let joined = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        joined.map(|outcome| outcome.map_err(|error: Error| error.to_string())).collect()
    })
}

/// The texts of errors, of which every rank has one.
fn errors<T>(outcomes: Vec<std::result::Result<T, String>>) -> Vec<String> {
    let text = |outcome: std::result::Result<T, String>| outcome.err().expect("an error");
    outcomes.into_iter().map(text).collect()
}
