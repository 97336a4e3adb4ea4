//! What a scaler needs from an optimizer.

use crate::{Error, Result};
use tch::{Device, Tensor};

/// What [`GradScaler`](super::GradScaler) needs from an optimizer. tch's optimizers implement it;
/// implement it for your own.
///
/// A scaler recognises an optimizer by its parameters. Between two updates, it treats two
/// optimizers that share a parameter as one, and unscales its gradients once.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::amp::{GradScaler, Optimizer};
///
/// /// w ← w − η sign(∇w)
/// struct SignSgd {
///     weights: Vec<Tensor>,
///     rate: f64,
/// }
///
/// impl Optimizer for SignSgd {
///     fn parameters(&self) -> Vec<Tensor> {
///         self.weights.iter().map(Tensor::shallow_clone).collect()
///     }
///     fn step(&mut self) -> tch_extension::Result<()> {
///         let _no_grad = tch::no_grad_guard();
///         for weight in &mut self.weights {
///             let step = weight.f_grad()?.f_sign()? * self.rate;
///             let _ = weight.f_sub_(&step)?;
///         }
///         Ok(())
///     }
/// }
///
/// let w = Tensor::from_slice(&[1.0_f32]).set_requires_grad(true);
/// let mut optimizer = SignSgd { weights: vec![w.shallow_clone()], rate: 0.25 };
/// let mut scaler = GradScaler::new(Default::default())?;
/// scaler.scale(&w.square().sum(Kind::Float))?.backward();
/// assert!(scaler.step(&mut optimizer)?);
/// assert_eq!(w.double_value(&[0]), 0.75);
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub trait Optimizer {
    /// The tensors whose gradients the optimizer applies.
    fn parameters(&self) -> Vec<Tensor>;

    /// Applies the gradients.
    ///
    /// # Errors
    /// An error of the optimizer.
    fn step(&mut self) -> Result<()>;

    /// Whether a CUDA graph may repeat [`step`](Self::step): `capturable` of torch's optimizers.
    /// It may if `step` neither waits for the GPU nor reads a number on the CPU that changes from
    /// step to step, such as a count of steps or a learning rate: those must be tensors on the GPU,
    /// which `step` changes in place. A graph would otherwise repeat the numbers of the step that
    /// was captured, without an error. The default is false.
    fn capturable(&self) -> bool {
        false
    }

    /// A number that changes when [`step`](Self::step) begins to do other work than before, for
    /// example when clipping is switched on. A graph that was captured before would go on without
    /// it; `train::Step` then captures anew. A new value of a tensor on the
    /// GPU is no other work, but other tensors in the place of the old ones are: a graph has the old
    /// addresses. So it must also differ between optimizers. The default is always 0; then call
    /// `Step::recapture` after such a change.
    fn revision(&self) -> u64 {
        0
    }

    /// Applies the gradients unless one of them is infinite or NaN, which the device itself decides:
    /// torch's `_step_supports_amp_scaling`. The optimizers of this crate do so. The default,
    /// `None`, says that this optimizer cannot; then the scaler unscales the gradients, waits for
    /// the device, and calls [`step`](Self::step) or not.
    ///
    /// The result has, for each device with gradients, a `Float` without dimensions that is not 0
    /// if a gradient was infinite or NaN; it may be empty if the gradients were unscaled before.
    fn step_on_device(&mut self, _gradients: ScaledGradients<'_>) -> Option<Result<Vec<Tensor>>> {
        None
    }

    /// What the next step does, apart from gradients and state: the algorithm, learning rates and
    /// other numbers, a line each. `distributed::Ddp::guard` compares it over all ranks before each
    /// step, because ranks that differ would go apart without an error. The default is empty: only
    /// the weights are compared, before the first step.
    fn settings(&self) -> String {
        String::new()
    }

    /// How often a state was loaded. Ranks compare what they loaded before the next step.
    fn loads(&self) -> u64 {
        0
    }

    /// The tensors of the state, with their names. They are no copies: do not change them. Counts of
    /// steps, of kind `Int64`, are compared before the first step, too.
    ///
    /// # Errors
    /// An error of libtorch.
    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(Vec::new())
    }

    /// `train::Step` calls this before each batch, also one that a graph replays, with whether the
    /// batch is the first and the last one of a step. An optimizer whose gradients come from several
    /// ranks then knows when they must be exchanged. A graph of a batch that is neither the first nor
    /// the last is also replayed as the first.
    ///
    /// # Errors
    /// An error of the optimizer; the batch is then not run.
    fn begin_batch(&mut self, _is_first: bool, _is_last: bool) -> Result<()> {
        Ok(())
    }

    /// `train::Step` calls this after each batch, also after one that failed; not after a panic. What
    /// follows is no part of a step, unless [`begin_batch`](Self::begin_batch) says so again.
    fn end_batch(&mut self) {}

    /// `train::Step` calls this when a batch has failed, with the error, and returns the result. An
    /// optimizer whose gradients come from several ranks can tell the others, and say which rank
    /// failed first. After a panic of its closure, the next call of the step calls it.
    fn batch_failed(&mut self, error: Error) -> Error {
        error
    }

    /// `train::Step` calls this after it has launched a graph on the current stream of the device.
    /// The work is not done by then. An optimizer whose gradients come from several ranks can watch
    /// that it ends.
    ///
    /// # Errors
    /// An error of the optimizer.
    fn replayed(&mut self, _device: Device) -> Result<()> {
        Ok(())
    }
}

/// What [`Optimizer::step_on_device`] is told about the gradients.
#[derive(Clone, Copy, Debug)]
pub enum ScaledGradients<'a> {
    /// They are multiplied by this scale: a `Float` without dimensions, on any device.
    Scaled(&'a Tensor),
    /// They were unscaled. If one of these is not 0, a gradient was infinite or NaN. They are
    /// `Float`s without dimensions, each on a device of its own.
    Unscaled(&'a [Tensor]),
}

/// `step` panics if tch's own `step` does. It is not capturable, because tch computes Adam's bias
/// correction on the CPU and keeps learning rates there.
impl Optimizer for tch::nn::Optimizer {
    fn parameters(&self) -> Vec<Tensor> {
        self.trainable_variables()
    }

    fn step(&mut self) -> Result<()> {
        tch::nn::Optimizer::step(self);
        Ok(())
    }
}
