//! What one call of a step does, whether it runs now or is being captured.

use super::StepOutput;
use super::parameters::{Parameters, are_same};
use crate::amp::GradScaler;
use crate::autograd::backward;
use crate::ffi::amp::clear_autocast_cache;
use crate::ffi::gradients as ffi;
use crate::optim::Optimizer;
use crate::{Error, Result, check};
use std::hash::{DefaultHasher, Hash, Hasher};
use tch::{Kind, Tensor};

/// What runs between the backward pass and the optimizer.
pub(super) type AfterBackward = Box<dyn FnMut(&[Tensor]) -> Result<()> + Send>;

/// Which part of a step a call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Adds up gradients.
    Accumulate,
    /// Adds up gradients, and then steps.
    Step,
}

/// Everything that the closure's result goes through.
pub(super) struct Work<O, F> {
    pub closure: F,
    pub optimizer: O,
    pub scaler: Option<GradScaler>,
    pub after_backward: Option<AfterBackward>,
    pub parameters: Parameters,
    /// How many batches make one step.
    pub accumulate: usize,
    /// With several batches per step, the tensors into which all gradients are added, at the same
    /// addresses for all graphs. Empty before the first call.
    sums: Vec<Tensor>,
}

impl<O: Optimizer, F> Work<O, F> {
    pub fn new(closure: F, optimizer: O, parameters: Parameters, accumulate: usize) -> Self {
        Work {
            closure,
            optimizer,
            scaler: None,
            after_backward: None,
            parameters,
            accumulate,
            sums: Vec::new(),
        }
    }

    /// Prepares the gradients for a call. With one batch per step there are none, so that the
    /// backward pass writes instead of adding. With several, they are the sums, which are zero
    /// before the first batch.
    pub fn prepare_gradients(&self, is_first: bool) -> Result<()> {
        if self.accumulate == 1 || self.sums.is_empty() {
            return if is_first { self.parameters.remove_gradients() } else { Ok(()) };
        }
        self.parameters.set_gradients(&self.sums)?;
        if is_first {
            ffi::zero(&self.sums)?;
        }
        Ok(())
    }

    /// After a call that ran without a graph: what it made are the sums from now on. Returns whether
    /// they are others than those before.
    pub fn keep_gradients(&mut self) -> Result<bool> {
        if self.accumulate == 1 {
            return Ok(false);
        }
        let before = std::mem::replace(&mut self.sums, self.parameters.gradients()?);
        Ok(!before.is_empty() && !are_same(&before, &self.sums))
    }

    /// The gradients of a call that was captured.
    pub fn captured_gradients(&self, op: &str) -> Result<Vec<Tensor>> {
        let gradients = self.parameters.gradients()?;
        if self.accumulate == 1 || are_same(&gradients, &self.sums) {
            return Ok(gradients);
        }
        Err(Error::argument(
            op,
            "closure",
            "gradients for the same parameters in each call",
            "a parameter that had none before the capture",
            "with StepOptions::accumulate, use it during the warm-up, too",
        ))
    }

    /// Leaves everything as before the first batch of a step, after a call that failed.
    pub fn give_up(&mut self) -> Result<()> {
        if let Some(scaler) = &mut self.scaler {
            scaler.forget_unscaled();
        }
        clear_autocast_cache()?;
        match self.sums.is_empty() {
            true => self.parameters.remove_gradients(),
            false => self.parameters.set_gradients(&self.sums),
        }
    }

    /// Changes when a step does other work, or works on other memory, than before.
    pub fn revision(&self) -> u64
    where
        O: Optimizer,
    {
        revision_of(&self.optimizer, self.scaler.as_ref())
    }

    /// Takes the optimizer's parameters of now.
    pub fn renew_parameters(&mut self, op: &str) -> Result<()> {
        self.parameters = Parameters::of(op, &self.optimizer)?;
        self.sums = Vec::new();
        Ok(())
    }
}

impl<O, F, R> Work<O, F>
where
    O: Optimizer,
    F: FnMut(&[Tensor]) -> Result<R>,
    R: Into<StepOutput>,
{
    /// Runs the closure, the backward pass and, for [`Part::Step`], what changes the parameters.
    /// The gradients are prepared, and the optimizer knows which batch it is.
    pub fn run(&mut self, op: &str, batch: &[Tensor], part: Part) -> Result<StepOutput> {
        // Casts that the cache keeps are of weights before the last step, or belong to a capture.
        clear_autocast_cache()?;
        let output: StepOutput = (self.closure)(batch)?.into();
        check_loss(op, &output.loss)?;
        for (place, extra) in output.extra.iter().enumerate() {
            check!(op, &format!("extra tensor {place}"), extra).defined()?;
        }
        self.differentiate(&output.loss)?;
        if part == Part::Step {
            self.update()?;
        }
        clear_autocast_cache()?;
        Ok(StepOutput {
            loss: output.loss.f_detach()?.f_reshape([0_i64; 0])?,
            extra: output.extra.iter().map(|extra| Ok(extra.f_detach()?)).collect::<Result<_>>()?,
        })
    }

    fn differentiate(&mut self, loss: &Tensor) -> Result<()> {
        let mut loss = match self.accumulate {
            1 => loss.shallow_clone(),
            batches => loss.f_mul_scalar(1.0 / batches as f64)?,
        };
        if let Some(scaler) = &mut self.scaler {
            loss = scaler.scale(&loss)?;
        }
        backward(&[&loss], &Default::default())
    }

    fn update(&mut self) -> Result<()> {
        if let Some(after_backward) = &mut self.after_backward {
            after_backward(self.parameters.tensors())?;
        }
        match &mut self.scaler {
            None => self.optimizer.step(),
            Some(scaler) => {
                scaler.step(&mut self.optimizer)?;
                scaler.update()
            }
        }
    }
}

fn check_loss(op: &str, loss: &Tensor) -> Result<()> {
    let loss_arg = check!(op, loss).defined()?.kind_in(&[
        Kind::Float,
        Kind::Double,
        Kind::Half,
        Kind::BFloat16,
    ])?;
    if loss.numel() != 1 {
        let hint = "take its mean or its sum";
        return Err(loss_arg.refuse("one element", format!("shape {:?}", loss.size()), hint));
    }
    if !loss.requires_grad() {
        let hint = "is grad mode off, or was it detached from the parameters?";
        return Err(loss_arg.refuse("a loss that requires grad", "one that does not", hint));
    }
    Ok(())
}

pub(super) fn revision_of(optimizer: &impl Optimizer, scaler: Option<&GradScaler>) -> u64 {
    let mut hasher = DefaultHasher::new();
    (optimizer.revision(), scaler.map(GradScaler::revision)).hash(&mut hasher);
    hasher.finish()
}
