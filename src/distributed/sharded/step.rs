//! A step: gradients become means over all ranks, each rank updates its part, and all get all parts.

use super::ShardedOptimizer;
use super::gradients::lock;
use super::weights::Weights;
use crate::amp::ScaledGradients;
use crate::distributed::agree::checksums;
use crate::distributed::{ProcessGroup, ReduceOp, Work};
use crate::optim::shard::AcrossRanks;
use crate::{Error, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use tch::{Device, Tensor};

const STEP: &str = "ShardedOptimizer::step";

/// The other ranks in a step.
struct Ranks<'a> {
    group: &'a ProcessGroup,
    weights: &'a Weights,
    device: Device,
    /// The parts of this rank in each bucket.
    batches: &'a [Range<usize>],
    totals: &'a Tensor,
    works: Vec<Work>,
}

impl AcrossRanks for Ranks<'_> {
    fn device(&self) -> Device {
        self.device
    }

    fn add_up(&mut self, totals: &Tensor) -> Result<()> {
        if self.group.size() > 1 {
            self.group.all_reduce(totals, ReduceOp::Sum)?;
        }
        self.totals.shallow_clone().f_copy_(totals)?;
        Ok(())
    }

    fn batches(&self) -> Vec<Range<usize>> {
        self.batches.to_vec()
    }

    fn updated(&mut self, batch: usize) -> Result<()> {
        self.works.extend(self.weights.gather(self.group, batch)?);
        Ok(())
    }
}

impl ShardedOptimizer {
    /// Updates all parameters with the mean gradients of all ranks. Every rank must call it, after
    /// its backward pass.
    ///
    /// # Errors
    /// When a parameter got no gradient (see
    /// [`allow_unused`](super::ShardedOptions::allow_unused)), has other memory than before, or was
    /// added to the store; when the learning rate, another number or, in the first step and after a load,
    /// a weight is not that of the other ranks, which the error names; when another rank ended, failed
    /// or did not take part until the timeout. The group is then given up on all ranks.
    pub fn step(&mut self) -> Result<()> {
        self.run(None).map(drop)
    }

    /// Computes the gradients of the loss and updates the parameters: `loss.backward()` and
    /// [`step`](Self::step). If the backward pass fails, the group is given up, so that no other
    /// rank waits for this one.
    ///
    /// # Errors
    /// As for [`step`](Self::step), and an error of the backward pass.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.zero_grad()?;
        if let Err(error) = loss.f_backward() {
            let reason = Error::from(error).to_string();
            return Err(lock(&self.gradients).fail("ShardedOptimizer::backward_step", reason));
        }
        self.step()
    }

    /// Forgets the gradients since the last step. It is not needed: a step forgets them, too.
    ///
    /// # Errors
    /// When gradients of a backward pass are being reduced already: other ranks would take those of
    /// the next one for them. The group is then given up.
    pub fn zero_grad(&mut self) -> Result<()> {
        let tensors = self.weights.parameters.iter().map(|parameter| &parameter.tensor);
        crate::optim::shard::forget_gradients(tensors)?;
        lock(&self.gradients).give_up("ShardedOptimizer::zero_grad")
    }

    /// Lets the backward passes inside `f` only add up gradients on this rank. The first one outside
    /// sends the sums. So N batches are as one large batch if each loss is divided by N:
    ///
    /// ```
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # use tch_extension::distributed::{ProcessGroup, ShardedOptimizer, ShardedOptions};
    /// # use tch_extension::optim::{OptimizerConfig, Sgd};
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// # let w = vs.root().ones("w", &[2]);
    /// # let optimizer = Sgd::default().build(&vs, 1.0)?;
    /// let group = ProcessGroup::single()?;
    /// let mut optimizer = ShardedOptimizer::new(&group, optimizer, &ShardedOptions::default())?;
    /// let batches = [1.0, 2.0, 3.0];
    /// for (place, batch) in batches.iter().enumerate() {
    ///     let loss = (&w * *batch).sum(Kind::Float) / 3.0;
    ///     match place + 1 < batches.len() {
    ///         true => optimizer.no_sync(|| loss.backward()),
    ///         false => loss.backward(),
    ///     }
    /// }
    /// optimizer.step()?;
    /// assert_eq!(w, Tensor::from_slice(&[-1.0_f32, -1.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn no_sync<T>(&self, f: impl FnOnce() -> T) -> T {
        let before = lock(&self.gradients).set_last(false);
        // Also if `f` panics.
        let _restored = Restored { optimizer: self, before };
        f()
    }

    /// A step, and what it found if the gradients are scaled.
    fn run(&mut self, scale: Option<&Tensor>) -> Result<Option<Tensor>> {
        let outcome = self.try_run(scale);
        outcome.inspect_err(|error| drop(lock(&self.gradients).fail(STEP, error.to_string())))
    }

    /// Is an error on every rank if the next step would not be the same on all.
    fn agree(&mut self) -> Result<()> {
        let exempt = &self.exempt;
        let settings = format!("{}\nexempt later: {exempt:?}", self.inner.settings(true));
        let numbers = (settings, self.inner.loads());
        let weights = &self.weights.parameters;
        // States were compared when they were loaded.
        self.agreement.check(STEP, &self.group, numbers, |_| {
            checksums(weights.iter().map(|weight| (weight.name.as_str(), &weight.tensor)))
        })
    }

    fn try_run(&mut self, scale: Option<&Tensor>) -> Result<Option<Tensor>> {
        self.weights.check(STEP)?;
        self.check_variables(STEP)?;
        // A rank that waits for a step must have seen whether its reductions have failed.
        lock(&self.gradients).finish(STEP)?;
        self.agree()?;
        let mut gradients = lock(&self.gradients);
        let _no_grad = tch::no_grad_guard();
        let parts: Vec<Option<&Tensor>> = self.part_gradients.iter().map(Some).collect();
        let mut ranks = Ranks {
            group: &self.group,
            weights: &self.weights,
            device: self.device,
            batches: &self.batches,
            totals: &self.totals,
            works: Vec::new(),
        };
        let found_inf = self.inner.step_across(&parts, scale, &mut ranks)?;
        ranks.works.into_iter().try_for_each(Work::wait)?;
        self.has_norm |= self.inner.clips();
        self.weights.bump_versions()?;
        gradients.end()?;
        Ok(found_inf)
    }
}

/// When dropped, says again what backward passes are.
struct Restored<'a> {
    optimizer: &'a ShardedOptimizer,
    before: bool,
}

impl Drop for Restored<'_> {
    fn drop(&mut self) {
        lock(&self.optimizer.gradients).set_last(self.before);
    }
}

/// The gradients themselves are undefined after a backward pass, because the optimizer has taken
/// them. So [`GradScaler::unscale`](crate::amp::GradScaler::unscale) finds none; clip with
/// [`ShardedOptimizer::set_clip_norm`].
impl crate::optim::Optimizer for ShardedOptimizer {
    fn parameters(&self) -> Vec<Tensor> {
        self.trainable_variables()
    }

    fn step(&mut self) -> Result<()> {
        ShardedOptimizer::step(self)
    }

    fn capturable(&self) -> bool {
        true
    }

    fn revision(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let inner = crate::optim::Optimizer::revision(&self.inner);
        (inner, lock(&self.gradients).adds()).hash(&mut hasher);
        hasher.finish()
    }

    fn begin_batch(&mut self, is_first: bool, is_last: bool) -> Result<()> {
        let mut gradients = lock(&self.gradients);
        if is_first {
            gradients.give_up("ShardedOptimizer")?;
        }
        if !(is_first && is_last) {
            gradients.begin_to_add()?;
        }
        gradients.set_last(is_last);
        drop(gradients);
        self.agreement.begin_batch();
        if is_last {
            self.agree()?;
        }
        Ok(())
    }

    fn end_batch(&mut self) {
        lock(&self.gradients).set_last(true);
        self.agreement.end_batch();
    }

    /// Other ranks must not wait for this one, and nobody may use what is left of the step. A group
    /// of one goes on.
    fn batch_failed(&mut self, error: Error) -> Error {
        let mut gradients = lock(&self.gradients);
        if self.group.size() == 1 {
            // Replays are not counted, so the buffers are emptied in any case.
            return gradients.end().err().unwrap_or(error);
        }
        if self.group.failure().is_some() {
            return error;
        }
        let error = self.group.cause_of(STEP, error);
        drop(gradients.fail(STEP, error.to_string()));
        error
    }

    fn replayed(&mut self, device: Device) -> Result<()> {
        self.replays.add(STEP, &self.group, device)
    }

    fn step_on_device(&mut self, gradients: ScaledGradients<'_>) -> Option<Result<Vec<Tensor>>> {
        Some(match gradients {
            ScaledGradients::Scaled(scale) => {
                self.run(Some(scale)).map(|found| found.into_iter().collect())
            }
            ScaledGradients::Unscaled(_) => Err(Error::argument(
                STEP,
                "gradients",
                "gradients that GradScaler::step unscales",
                "some that were unscaled before",
                "leave GradScaler::unscale out; set_clip_norm clips unscaled gradients",
            )),
        })
    }
}
