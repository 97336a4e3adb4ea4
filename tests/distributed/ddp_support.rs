//! A small model, its data and its gradients, for the tests of `Ddp`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, checkpoint, grad};
use tch_extension::distributed::{Ddp, DdpOptions, GroupOptions, ProcessGroup, ReduceOp, Store};
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::{Error, Result};

/// How long the ranks of a test wait for one another.
pub const TIMEOUT: Duration = Duration::from_secs(8);

/// Runs ranks as threads, and returns what each one returned. No test may take as long as the
/// timeout: a rank that fails must make the others fail at once.
pub fn each_rank<T: Send>(
    n: usize,
    run: impl Fn(&ProcessGroup) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let begin = Instant::now();
    let store = Store::hash(TIMEOUT).expect("a store");
    let (store, run) = (&store, &run);
    let one = move |rank: usize| {
        let group = ProcessGroup::with_store(store, rank, n, &GroupOptions::with_timeout(TIMEOUT))?;
        let outcome = catch_unwind(AssertUnwindSafe(|| run(&group)));
        let outcome = outcome.unwrap_or_else(|payload| {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()));
            Err(Error::msg(format!("panicked: {}", text.unwrap_or_default())))
        });
        match &outcome {
            // No rank may close its connections before the others have ended.
            Ok(_) => drop(group.barrier()),
            Err(error) => group.poison(&error.to_string()),
        }
        outcome
    };
    let outcomes = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n).map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    assert!(begin.elapsed() < TIMEOUT, "a rank waited until the timeout");
    outcomes
}

/// The same for ranks that all must succeed.
pub fn all_ranks<T: Send>(n: usize, run: impl Fn(&ProcessGroup) -> Result<T> + Sync) -> Vec<T> {
    let outcomes = each_rank(n, run);
    let errors: Vec<String> =
        outcomes.iter().filter_map(|outcome| Some(outcome.as_ref().err()?.to_string())).collect();
    assert!(errors.is_empty(), "{errors:#?}");
    outcomes.into_iter().map(|outcome| outcome.expect("checked")).collect()
}

/// The errors of ranks that all must fail.
pub fn all_fail<T: Send>(n: usize, run: impl Fn(&ProcessGroup) -> Result<T> + Sync) -> Vec<String> {
    let fails = |(rank, outcome): (usize, Result<T>)| match outcome {
        Ok(_) => panic!("rank {rank} did not fail"),
        Err(error) => error.to_string(),
    };
    each_rank(n, run).into_iter().enumerate().map(fails).collect()
}

/// Numbers between -1 and 1 that depend on a seed only: libtorch's generator belongs to all threads.
pub fn numbers(size: &[i64], seed: i64) -> Tensor {
    let count = size.iter().product::<i64>();
    let phases =
        Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed as f64 * 78.233;
    (phases.sin() * 43_758.545_3).fmod(1.0).reshape(size).to_kind(Kind::Float)
}

/// The input of a rank in a step.
pub fn batch(rank: usize, step: i64) -> Tensor {
    numbers(&[4, 16], 1000 + 100 * step + rank as i64)
}

pub const LAYERS: usize = 4;

/// `LAYERS` layers of 16 units, with weights that depend on the seed.
pub fn network(seed: i64) -> VarStore {
    let vs = VarStore::new(Device::Cpu);
    for layer in 0..LAYERS {
        let path = vs.root() / format!("layer{layer}");
        let _ = path.var("weight", &[16, 16], Init::Const(0.0));
        let _ = path.var("bias", &[16], Init::Const(0.0));
    }
    let _no_grad = tch::no_grad_guard();
    for (place, mut variable) in vs.trainable_variables().into_iter().enumerate() {
        let values = numbers(&variable.size(), 10 * seed + place as i64);
        variable.copy_(&(values * 0.3));
    }
    vs
}

/// A network on the group's device, whose weights depend on the seed, with its Ddp and its weights.
pub fn averaged(
    group: &ProcessGroup,
    seed: i64,
    options: DdpOptions,
) -> Result<(VarStore, Ddp, Vec<Tensor>)> {
    let mut vs = network(seed);
    vs.set_device(group.device());
    let ddp = Ddp::new(group, &vs, options)?;
    let weights = vs.trainable_variables();
    Ok((vs, ddp, weights))
}

/// The output of a network, without the layers in `left_out`.
pub fn output(weights: &[Tensor], x: &Tensor, left_out: &[usize]) -> Tensor {
    let mut h = x.shallow_clone();
    for (layer, pair) in weights.chunks(2).enumerate() {
        if !left_out.contains(&layer) {
            h = h.linear(&pair[0], Some(&pair[1])).tanh();
        }
    }
    h
}

pub fn loss(weights: &[Tensor], x: &Tensor) -> Tensor {
    output(weights, x, &[]).square().mean(Kind::Float)
}

/// The output of a network that computes each layer again in the backward pass.
pub fn checkpointed(weights: &[Tensor], x: &Tensor) -> Result<Tensor> {
    let layer = |inputs: &[Option<Tensor>]| match inputs {
        [Some(x), Some(weight), Some(bias)] => Ok(x.linear(weight, Some(bias)).tanh().into()),
        _ => Err(Error::msg("three inputs")),
    };
    weights.chunks(2).try_fold(x.shallow_clone(), |h, pair| {
        checkpoint(layer, &[Some(&h), Some(&pair[0]), Some(&pair[1])])?.single()
    })
}

/// The gradients of this rank alone. An absent one is zero.
pub fn own_gradients(weights: &[Tensor], loss: &Tensor) -> Result<Vec<Tensor>> {
    let inputs: Vec<&Tensor> = weights.iter().collect();
    let gradients =
        grad(&[loss], &inputs, &GradOptions { allow_unused: true, ..Default::default() })?;
    let zero = |(gradient, weight): (Option<Tensor>, &Tensor)| {
        gradient.unwrap_or_else(|| weight.zeros_like().detach())
    };
    Ok(gradients.into_vec().into_iter().zip(weights).map(zero).collect())
}

/// The means of all ranks, by plain collectives: divided first, as c10d does.
pub fn means(group: &ProcessGroup, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
    let mean = |tensor: &Tensor| {
        let mean = tensor / group.size() as f64;
        group.all_reduce(&mean, ReduceOp::Sum)?;
        Ok(mean)
    };
    tensors.iter().map(mean).collect()
}

/// Whether a tensor has the same bits on all ranks.
pub fn is_alike(group: &ProcessGroup, tensor: &Tensor) -> Result<bool> {
    let all = group.all_gather(&tensor.detach().contiguous())?;
    Ok(all.iter().all(|other| other.equal(&all[0])))
}

/// Panics unless the gradients are these, have the same bits on all ranks, and none is absent.
pub fn assert_gradients(
    group: &ProcessGroup,
    weights: &[Tensor],
    expected: &[Tensor],
    tolerance: f64,
) -> Result<()> {
    for (place, (weight, expected)) in weights.iter().zip(expected).enumerate() {
        let gradient = weight.grad();
        assert!(gradient.defined(), "parameter {place} has no gradient");
        let worst = (&gradient - expected).abs().max().double_value(&[]);
        assert!(worst <= tolerance, "parameter {place}: {worst}");
        assert!(is_alike(group, &gradient)?, "parameter {place} differs over ranks");
    }
    Ok(())
}

/// Forward and backward pass of a model, whose gradients must be the means of those that the ranks
/// have without a Ddp.
pub fn check_pass(
    group: &ProcessGroup,
    vs: &VarStore,
    ddp: &Ddp,
    tolerance: f64,
    loss: impl Fn() -> Tensor,
) -> Result<()> {
    let weights = vs.trainable_variables();
    let expected = means(group, &own_gradients(&weights, &loss())?)?;
    drop_gradients(vs, false)?;
    ddp.backward(&ddp.forward(|| Ok(loss()))?)?;
    ddp.check()?;
    assert_gradients(group, &weights, &expected, tolerance)
}

/// Removes the gradients, or sets them to zero.
pub fn drop_gradients(vs: &VarStore, to_zero: bool) -> Result<()> {
    if !to_zero {
        return AdamW::default().build(vs, 0.1)?.zero_grad();
    }
    for weight in vs.trainable_variables() {
        let gradient = weight.grad();
        if gradient.defined() {
            let _ = gradient.shallow_clone().f_zero_()?;
        }
    }
    Ok(())
}

/// w ← w - rate ∇w
pub fn descend(weights: &[Tensor], rate: f64) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for weight in weights {
        let _ = weight.shallow_clone().f_sub_(&(weight.f_grad()? * rate))?;
    }
    Ok(())
}

/// The largest difference of two lists of tensors.
pub fn worst(left: &[Tensor], right: &[Tensor]) -> f64 {
    assert_eq!(left.len(), right.len());
    let difference =
        |(left, right): (&Tensor, &Tensor)| (left - right).abs().max().double_value(&[]);
    left.iter().zip(right).map(difference).fold(0.0, f64::max)
}

/// Copies without history.
pub fn copies(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(|tensor| tensor.detach().copy()).collect()
}

/// 1 MiB has this many bytes, and the tests have buckets of few bytes.
pub fn mib(bytes: usize) -> f64 {
    bytes as f64 / 1_048_576.0
}

pub fn small_buckets() -> DdpOptions {
    DdpOptions { bucket_cap_mb: mib(1200), first_bucket_mb: mib(600), ..Default::default() }
}

/// Some steps of a network whose weights differ at the start, in which each gradient is compared
/// with the mean.
pub fn check_steps(group: &ProcessGroup, options: DdpOptions, tolerance: f64) -> Result<Ddp> {
    let (vs, ddp, weights) = averaged(group, group.rank() as i64, options)?;
    assert_eq!(worst(&weights, &network(0).trainable_variables()), 0.0, "rank 0's values");
    for step in 0..5 {
        let x = batch(group.rank(), step);
        let expected = means(group, &own_gradients(&weights, &loss(&weights, &x))?)?;
        drop_gradients(&vs, step % 2 == 1)?;
        let loss = ddp.forward(|| Ok(loss(&weights, &x)))?;
        ddp.backward(&loss)?;
        ddp.check()?;
        assert_gradients(group, &weights, &expected, tolerance)?;
        descend(&weights, 0.5)?;
    }
    Ok(ddp)
}
