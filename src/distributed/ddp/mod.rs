//! Data-parallel training: every rank has a copy of the model and its own part of the batch, and the
//! gradients are averaged over all ranks while the backward pass still runs.

mod model;
mod optimizer;
mod options;
mod outputs;
mod statistics;

pub use optimizer::DdpOptimizer;
pub use options::{Bucket, CommHook, DdpOptions};
pub use outputs::Outputs;
pub use statistics::DdpStatistics;

use super::agree::{Agreement, checksums};
use super::watch::Replays;
use super::{ProcessGroup, failed};
use crate::autograd::backward;
use crate::cuda::is_capturing;
use crate::ffi::amp::identity;
use crate::ffi::distributed::ddp as ffi;
use crate::optim::Optimizer;
use crate::{Error, Result};
use model::{Model, Source};
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

const NEW: &str = "Ddp::new";
const FORWARD: &str = "Ddp::forward";
const BACKWARD: &str = "Ddp::backward";
const STEP: &str = "Ddp::step";

/// Averages the gradients of a model over all ranks: `torch.nn.parallel.DistributedDataParallel`,
/// by the same `Reducer` of libtorch.
///
/// At the start, all ranks compare their parameters and take the values of rank 0, so that they begin
/// alike. That is no way to load a checkpoint: every rank loads it. The forward pass
/// runs in [`forward`](Ddp::forward). During the backward pass, gradients are collected in buckets,
/// and each bucket is averaged as soon as it is complete, while the pass goes on. At its end, `grad`
/// of each parameter is `(g₀ + … + gₙ₋₁) / n`, with the same bits on all ranks. The same step of the
/// same optimizer then keeps the copies of the model equal.
///
/// So with the mean of the losses over a rank's part of the batch, n ranks train as one rank with
/// the whole batch, to rounding, if all parts have one size.
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Reduction, Tensor};
/// use tch_extension::distributed::{Ddp, DdpOptions, run_ranks};
/// use tch_extension::optim::{AdamW, OptimizerConfig};
///
/// let losses = run_ranks(2, |group| {
///     let vs = nn::VarStore::new(Device::Cpu);
///     let model = nn::linear(vs.root(), 4, 1, Default::default());
///     let ddp = Ddp::new(&group, &vs, DdpOptions::default())?;
///     let mut optimizer = ddp.guard(AdamW::default().build(&vs, 0.1)?)?;
///     let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu)) * (group.rank() as f64);
///     let y = x.sum_dim_intlist(1, true, Kind::Float);
///     let mut last = f64::INFINITY;
///     for _ in 0..20 {
///         let loss = ddp.forward(|| Ok(model.forward(&x).mse_loss(&y, Reduction::Mean)))?;
///         optimizer.get_mut().zero_grad()?;
///         ddp.backward(&loss)?;
///         optimizer.step()?;
///         last = loss.double_value(&[]);
///     }
///     Ok((last, f64::try_from(vs.trainable_variables()[0].sum(Kind::Double))?))
/// })?;
/// assert_eq!(losses[0].1, losses[1].1, "the weights are the same");
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Rules
///
/// - Every rank makes the same model and calls `forward` and `backward` equally often. What depends
///   on the rank, such as saving on rank 0, must not call collectives.
/// - The loss is computed inside of `forward`, or from its outputs only.
/// - Parameters that a pass does not use need
///   [`find_unused_parameters`](DdpOptions::find_unused_parameters) or
///   [`static_graph`](DdpOptions::static_graph). Otherwise the next call says which ones got no
///   gradient.
/// - For an evaluation, call the model itself: with `Ddp::forward`, all ranks would have to take part.
/// - Variables that join the model later, or that are frozen or thawed, need a new `Ddp`.
/// - Sparse gradients are an error; use dense embeddings.
///
/// # What can go wrong
///
/// A step of one rank alone would let the copies differ without anybody noticing. So every error and
/// every panic inside of `forward`, `backward` and the step makes this rank give the group up
/// ([`ProcessGroup::poison`]), and [`ProcessGroup::run`] around the training does so for what fails
/// between them: the other ranks get an error at once, instead of waiting until the
/// timeout or taking this rank's next bucket for the one that it did not send. Start again from a
/// checkpoint with a new group, or let a launcher restart all ranks.
///
/// [`guard`](Ddp::guard) makes an optimizer whose step fails if a gradient was not averaged: because
/// its backward pass did not begin in `forward`, was the second one of a forward pass, or was part of
/// [`no_sync`](Ddp::no_sync) without a synchronised pass after it.
///
/// It also fails, on every rank, if the optimizers of the ranks differ: in a learning rate or another
/// number, in how often a state was loaded, in what was loaded, and before the first step and after each
/// load in the weights. For that, each step costs one all-reduce of 16 bytes on the CPU. The optimizers
/// of tch do not tell their numbers: only the weights before the first step are compared then. With
/// [`DdpOptions::with_python`], nothing is.
///
/// A group of one rank computes as if there were no `Ddp`: nothing is copied, rounded or checked, and
/// a hook is not called.
///
/// # Captured steps
///
/// `train::Step` takes a guarded optimizer, and a closure that calls `forward`. On CUDA, the
/// collectives of NCCL are then part of the graph. All ranks must warm up, capture and replay in the
/// same calls, so they need batches of the same shapes, and a warm-up of at least 3 calls. While a
/// graph with collectives is replayed, a thread watches that it ends within the group's timeout, and
/// otherwise aborts the process, because NCCL's own watchdog does not see replays. With
/// [`OnNcclError::Abort`](super::OnNcclError::Abort) it gives the group up instead, and the next
/// step is an error.
/// `find_unused_parameters` cannot be captured.
///
/// Clones are handles of the same `Ddp`.
#[derive(Clone)]
pub struct Ddp {
    inner: Arc<Inner>,
}

struct Inner {
    group: ProcessGroup,
    /// `None` in a group of one.
    reduction: Option<ffi::Ddp>,
    source: Option<Source>,
    names: Vec<String>,
    identities: HashSet<usize>,
    /// The parameters. They are kept, so that no other tensor gets the identity of one.
    parameters: Mutex<Vec<Tensor>>,
    device: Device,
    /// Held during a forward pass.
    forward: Mutex<()>,
    /// How many [`Unsynchronised`] there are.
    unsynchronised: AtomicUsize,
    replays: Replays,
    /// Whether other ranks take part in comparisons of optimizers.
    compares: bool,
    /// Of the optimizers that [`Ddp::step`] got, by their first parameters, which tell them apart.
    agreements: Mutex<HashMap<Option<usize>, Agreement>>,
}

/// Passes are not synchronised as long as it lives.
#[derive(Debug)]
struct Unsynchronised(Ddp);

impl Drop for Unsynchronised {
    fn drop(&mut self) {
        self.0.inner.unsynchronised.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Ddp {
    /// Makes a `Ddp` for the variables of a store, in the order of their creation. Variables that
    /// were made without training are its buffers. All ranks call this.
    ///
    /// # Errors
    /// On every rank, when the models or the options differ, which names the first difference and
    /// the ranks; when a tensor is not suitable on one of them. On this rank, when another rank ended
    /// or did not come until the timeout.
    pub fn new(group: &ProcessGroup, vs: &VarStore, options: DdpOptions) -> Result<Ddp> {
        let (model, source) = Model::of_store(vs);
        Ddp::of_model(group, &model, Some(source), options)
    }

    /// Makes a `Ddp` for these parameters and buffers, each with a name. Frozen parameters may be
    /// among them; they are handed over, too.
    ///
    /// # Errors
    /// As for [`Ddp::new`].
    pub fn of_tensors(
        group: &ProcessGroup,
        parameters: &[(&str, &Tensor)],
        buffers: &[(&str, &Tensor)],
        options: DdpOptions,
    ) -> Result<Ddp> {
        Ddp::of_model(group, &Model::of_tensors(parameters, buffers), None, options)
    }

    fn of_model(
        group: &ProcessGroup,
        model: &Model,
        source: Option<Source>,
        options: DdpOptions,
    ) -> Result<Ddp> {
        let checked = model.check(NEW, group).and_then(|()| options.parts(NEW));
        let parts = if options.with_python || group.size() == 1 {
            // Python's ranks take no part in a comparison of ours.
            checked.inspect_err(|error| group.give_up(&error.to_string()))?
        } else {
            let own =
                checked.as_ref().map(|_| model).map_err(|error| Error::msg(error.to_string()));
            model::compare(NEW, group, own, &options.describe())?;
            checked?
        };
        let compares = group.size() > 1 && !options.with_python;
        let reduction = match group.size() {
            1 => None,
            _ => Some(reduction(group, model, &parts, options)?),
        };
        let trained: Vec<&(String, Tensor)> = model.trained().collect();
        Ok(Ddp {
            inner: Arc::new(Inner {
                group: group.clone(),
                reduction,
                source,
                names: trained.iter().map(|(name, _)| name.clone()).collect(),
                identities: trained.iter().map(|(_, tensor)| identity(tensor)).collect(),
                parameters: Mutex::new(
                    trained.iter().map(|(_, tensor)| tensor.shallow_clone()).collect(),
                ),
                device: trained.first().map_or(Device::Cpu, |(_, tensor)| tensor.device()),
                forward: Mutex::new(()),
                unsynchronised: AtomicUsize::new(0),
                replays: Replays::default(),
                compares,
                agreements: Mutex::default(),
            }),
        })
    }

    /// Runs a forward pass, so that the gradients of its backward pass are averaged. The result may
    /// be a tensor, such as the loss, or several: see [`Outputs`].
    ///
    /// If the loss is made from the outputs, all that depend on the parameters must be outputs. A
    /// call with grad mode off only runs the closure, after it has handed over the buffers.
    ///
    /// # Errors
    /// When the last backward pass did not finish its reduction, which names the parameters without
    /// a gradient; when the parameters are no longer those of [`Ddp::new`]; when the group has
    /// failed; an error of the closure. This rank then gives the group up.
    pub fn forward<T: Outputs>(&self, model: impl FnOnce() -> Result<T>) -> Result<T> {
        let inner = &*self.inner;
        let Some(reduction) = &inner.reduction else { return model() };
        let _forward = inner.lock_forward(FORWARD)?;
        inner.group.run(|| {
            if inner.source.as_ref().is_some_and(Source::has_grown) {
                let reason = "variables were added to the model after Ddp::new; make the Ddp later";
                return Err(failed(FORWARD, reason));
            }
            let capturing = inner.is_capturing(FORWARD)?;
            {
                let _start = inner.group.starting(FORWARD)?;
                reduction
                    .begin(inner.synchronises(), capturing)
                    .map_err(|reason| inner.group.error(FORWARD, &reason))?;
            }
            let mut outputs = model()?;
            let mut tensors = outputs::handles(&mut outputs);
            reduction.end(&mut tensors).map_err(|reason| inner.group.error(FORWARD, &reason))?;
            outputs::replace(&mut outputs, tensors);
            Ok(outputs)
        })
    }

    /// Runs the backward pass of a loss. Unlike `loss.backward()`, it does not panic, and it finds
    /// out at once whether all gradients were averaged. With a scaler, pass the scaled loss.
    ///
    /// # Errors
    /// An error of the backward pass, such as one of another rank; parameters that got no gradient.
    /// This rank then gives the group up.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        let inner = &*self.inner;
        let Some(reduction) = &inner.reduction else {
            return backward(&[loss], &Default::default());
        };
        inner.group.run(|| {
            backward(&[loss], &Default::default())
                .map_err(|error| inner.group.error(BACKWARD, &error.to_string()))?;
            if inner.synchronises() {
                reduction.check(false).map_err(|reason| inner.group.error(BACKWARD, &reason))?;
            }
            Ok(())
        })
    }

    /// Runs `body`, in which forward passes are not synchronised: their gradients add up on this
    /// rank, and the next synchronised pass averages the sum. Several batches then make one step with
    /// one communication.
    ///
    /// ```
    /// # use tch::nn::{self, Module};
    /// # use tch::{Device, Kind, Tensor};
    /// # use tch_extension::distributed::{Ddp, DdpOptions, run_ranks};
    /// # run_ranks(2, |group| {
    /// #     let vs = nn::VarStore::new(Device::Cpu);
    /// #     let model = nn::linear(vs.root(), 3, 1, Default::default());
    /// #     let ddp = Ddp::new(&group, &vs, DdpOptions::default())?;
    /// #     let batches = [(); 3].map(|()| Tensor::ones([4, 3], (Kind::Float, Device::Cpu)));
    /// let run = |batch: &Tensor| {
    ///     let loss = ddp.forward(|| Ok(model.forward(batch).mean(Kind::Float) / 3.0))?;
    ///     ddp.backward(&loss)
    /// };
    /// ddp.no_sync(|| batches[..2].iter().try_for_each(run))?;
    /// run(&batches[2])?; // averages the sum of all three
    /// ddp.check()?;
    /// #     Ok(())
    /// # })?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn no_sync<T>(&self, body: impl FnOnce() -> T) -> T {
        let _unsynchronised = self.unsynchronise();
        body()
    }

    fn unsynchronise(&self) -> Unsynchronised {
        self.inner.unsynchronised.fetch_add(1, Ordering::Relaxed);
        Unsynchronised(self.clone())
    }

    /// Whether all gradients are the averages of all ranks. It asks no other rank.
    ///
    /// # Errors
    /// When a reduction is not finished, which names the parameters without a gradient; when
    /// gradients of this rank only were added since; when the group has failed.
    pub fn check(&self) -> Result<()> {
        let Some(reduction) = &self.inner.reduction else { return Ok(()) };
        let op = "Ddp::check";
        drop(self.inner.group.starting(op)?);
        reduction.check(false).map_err(|reason| self.inner.group.error(op, &reason))
    }

    /// Checks as a [guarded](Ddp::guard) optimizer does, and steps.
    ///
    /// # Errors
    /// As for [`DdpOptimizer::step`].
    pub fn step(&self, optimizer: &mut impl Optimizer) -> Result<()> {
        self.check_for_step()?;
        {
            let first = optimizer.parameters().first().map(identity);
            let agreements = &self.inner.agreements;
            let mut agreements = agreements.lock().unwrap_or_else(PoisonError::into_inner);
            self.agree(&*optimizer, agreements.entry(first).or_default())?;
        }
        self.stepped(self.inner.group.run(|| optimizer.step()))
    }

    /// Makes an optimizer that refuses gradients which are not averages of all ranks.
    ///
    /// # Errors
    /// When the optimizer has a parameter that requires a gradient and does not belong to this `Ddp`.
    pub fn guard<O: Optimizer>(&self, optimizer: O) -> Result<DdpOptimizer<O>> {
        DdpOptimizer::new(self.clone(), optimizer)
    }

    /// What c10d has measured. In a group of one, all is zero. On CUDA, it waits for the GPU.
    ///
    /// # Errors
    /// During a forward pass, or an error of CUDA.
    pub fn statistics(&self) -> Result<DdpStatistics> {
        let Some(reduction) = &self.inner.reduction else { return Ok(DdpStatistics::default()) };
        let op = "Ddp::statistics";
        let _forward = self.inner.lock_forward(op)?;
        let (numbers, sizes) = reduction.statistics().map_err(|reason| failed(op, reason))?;
        Ok(DdpStatistics::of(numbers, &sizes))
    }

    /// After the first 10 passes, measures one in `passes`. Default: 100.
    ///
    /// # Errors
    /// When `passes` is 0 or larger than 2³¹, or during a forward pass.
    pub fn sample_every(&self, passes: usize) -> Result<()> {
        let op = "Ddp::sample_every";
        let number = i32::try_from(passes).ok().filter(|number| *number > 0);
        let Some(number) = number else {
            let expected = "a number from 1 to 2³¹ - 1";
            return Err(Error::argument(op, "passes", expected, passes.to_string(), ""));
        };
        let Some(reduction) = &self.inner.reduction else { return Ok(()) };
        let _forward = self.inner.lock_forward(op)?;
        reduction.set_sample_rate(number).map_err(|reason| failed(op, reason))
    }

    /// The ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.inner.group
    }

    /// The names of the parameters whose gradients are averaged.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.inner.names.iter().map(String::as_str)
    }

    /// Whether the gradient of this tensor is averaged, or the tensor gets none.
    fn reduces(&self, tensor: &Tensor) -> bool {
        !tensor.requires_grad() || self.inner.identities.contains(&identity(tensor))
    }

    fn check_for_step(&self) -> Result<()> {
        let inner = &*self.inner;
        let Some(reduction) = &inner.reduction else { return Ok(()) };
        drop(inner.group.starting(STEP)?);
        inner.group.run(|| reduction.check(true).map_err(|reason| inner.group.error(STEP, &reason)))
    }

    /// Is an error on every rank if the next step would not be the same on all.
    fn agree(&self, optimizer: &impl Optimizer, agreement: &mut Agreement) -> Result<()> {
        let inner = &*self.inner;
        if !inner.compares {
            return Ok(());
        }
        let tensors = |was_loaded: bool| -> Result<Vec<String>> {
            let parameters = inner.parameters.lock().unwrap_or_else(PoisonError::into_inner);
            let mut lines = checksums(self.names().zip(parameters.iter()))?;
            let mut state = optimizer.state()?;
            // Moments that were not loaded may differ by rounding: where the ranks' machines do.
            state.retain(|(_, tensor)| was_loaded || tensor.kind() == Kind::Int64);
            lines.extend(checksums(state.iter().map(|(name, tensor)| (name.as_str(), tensor)))?);
            Ok(lines)
        };
        inner.group.run(|| {
            let numbers = (optimizer.settings(), optimizer.loads());
            agreement.check(STEP, &inner.group, numbers, tensors)
        })
    }

    /// After a step of the optimizer.
    fn stepped<T>(&self, outcome: Result<T>) -> Result<T> {
        let inner = &*self.inner;
        let Some(reduction) = &inner.reduction else { return outcome };
        let marked = outcome.and_then(|value| {
            reduction.mark_stepped().map_err(|reason| failed(STEP, reason)).map(|()| value)
        });
        marked.inspect_err(|error| inner.group.give_up(&error.to_string()))
    }

    /// Gives the group up, and says which rank failed first.
    fn batch_failed(&self, error: Error) -> Error {
        let group = &self.inner.group;
        if self.inner.reduction.is_none() || group.failure().is_some() {
            return error;
        }
        let error = group.cause_of(STEP, error);
        group.give_up(&error.to_string());
        error
    }

    /// Watches that what was launched so far on the current stream ends in time.
    fn replayed(&self, device: Device) -> Result<()> {
        self.inner.replays.add(STEP, &self.inner.group, device)
    }
}

fn reduction(
    group: &ProcessGroup,
    model: &Model,
    parts: &ffi::Options,
    options: DdpOptions,
) -> Result<ffi::Ddp> {
    let tensors = |tensors: &'_ [(String, Tensor)]| -> Vec<Tensor> {
        tensors.iter().map(|(_, tensor)| tensor.shallow_clone()).collect()
    };
    let buffers = if options.broadcast_buffers { tensors(&model.buffers) } else { Vec::new() };
    let parameters = model.parameters.iter().map(|(_, tensor)| tensor);
    let frozen = parameters.clone().filter(|tensor| !tensor.requires_grad());
    let borrowed = ffi::Model {
        parameters: model.trained().map(|(name, tensor)| (name.as_str(), tensor)).collect(),
        frozen: frozen.collect(),
        buffers: buffers.iter().collect(),
        states: parameters.chain(&buffers).collect(),
    };
    let hook = options::boxed(options.hook, group);
    let made = {
        let _start = group.starting(NEW)?;
        ffi::Ddp::new(group.handle(), &borrowed, parts, hook)
    };
    let made = made.map_err(|reason| group.error(NEW, &reason));
    made.inspect_err(|error| group.give_up(&error.to_string()))
}

impl Inner {
    fn synchronises(&self) -> bool {
        self.unsynchronised.load(Ordering::Relaxed) == 0
    }

    fn is_capturing(&self, op: &str) -> Result<bool> {
        match self.device {
            Device::Cuda(_) if crate::cuda::is_compiled() => is_capturing(op, self.device),
            _ => Ok(false),
        }
    }

    fn lock_forward(&self, op: &str) -> Result<MutexGuard<'_, ()>> {
        match self.forward.try_lock() {
            Ok(guard) => Ok(guard),
            // Nothing is protected that a panic could leave half done.
            Err(TryLockError::Poisoned(error)) => Ok(PoisonError::into_inner(error)),
            Err(TryLockError::WouldBlock) => {
                Err(failed(op, "a forward pass is running, in another thread or around this call"))
            }
        }
    }
}

impl fmt::Debug for Ddp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ddp")
            .field("group", &self.inner.group)
            .field("parameters", &self.inner.names.len())
            .finish_non_exhaustive()
    }
}
