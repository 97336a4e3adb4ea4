//! An optimizer that refuses gradients which are not averages of all ranks.

use super::super::agree::Agreement;
use super::{Ddp, Unsynchronised};
use crate::amp::ScaledGradients;
use crate::optim::Optimizer;
use crate::{Error, Result};
use tch::{Device, Tensor};

/// An optimizer whose step is an error unless its gradients are the averages of all ranks:
/// [`Ddp::guard`] makes it. [`GradScaler`](crate::amp::GradScaler) and `train::Step` take it.
#[derive(Debug)]
pub struct DdpOptimizer<O> {
    ddp: Ddp,
    optimizer: O,
    agreement: Agreement,
    /// While a batch runs that only adds to the gradients.
    accumulating: Option<Unsynchronised>,
}

impl<O: Optimizer> DdpOptimizer<O> {
    pub(super) fn new(ddp: Ddp, optimizer: O) -> Result<Self> {
        let parameters = optimizer.parameters();
        if let Some(place) = parameters.iter().position(|tensor| !ddp.reduces(tensor)) {
            return Err(Error::argument(
                "Ddp::guard",
                "optimizer",
                "parameters whose gradients the Ddp averages",
                format!(
                    "parameter {place}, of shape {:?}, which it does not",
                    parameters[place].size()
                ),
                "make the Ddp after all variables, and the optimizer from the same ones",
            ));
        }
        let agreement = Agreement::default();
        Ok(DdpOptimizer { ddp, optimizer, agreement, accumulating: None })
    }

    /// Applies the gradients.
    ///
    /// # Errors
    /// When a gradient was not averaged since it was computed, when there was no synchronised
    /// backward pass since the last step, or an error of the optimizer. This rank then gives the
    /// group up, because the others may have stepped. On every rank, when their optimizers differ,
    /// which the error names; see [`Ddp`].
    pub fn step(&mut self) -> Result<()> {
        self.check_for_step()?;
        let DdpOptimizer { ddp, optimizer, .. } = self;
        ddp.stepped(ddp.group().run(|| optimizer.step()))
    }

    fn check_for_step(&mut self) -> Result<()> {
        self.ddp.check_for_step()?;
        self.agree()
    }

    fn agree(&mut self) -> Result<()> {
        self.ddp.agree(&self.optimizer, &mut self.agreement)
    }

    /// The optimizer.
    pub fn get_ref(&self) -> &O {
        &self.optimizer
    }

    /// The optimizer, to set a learning rate, for example. Its own `step` checks nothing.
    pub fn get_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }

    /// The optimizer alone.
    pub fn into_inner(self) -> O {
        self.optimizer
    }

    /// What averages the gradients.
    pub fn ddp(&self) -> &Ddp {
        &self.ddp
    }
}

impl<O: Optimizer> Optimizer for DdpOptimizer<O> {
    fn parameters(&self) -> Vec<Tensor> {
        self.optimizer.parameters()
    }

    fn step(&mut self) -> Result<()> {
        DdpOptimizer::step(self)
    }

    fn capturable(&self) -> bool {
        self.optimizer.capturable()
    }

    fn revision(&self) -> u64 {
        self.optimizer.revision()
    }

    fn step_on_device(&mut self, gradients: ScaledGradients<'_>) -> Option<Result<Vec<Tensor>>> {
        if let Err(error) = self.check_for_step() {
            return Some(Err(error));
        }
        let DdpOptimizer { ddp, optimizer, .. } = self;
        let outcome = optimizer.step_on_device(gradients)?;
        Some(ddp.stepped(outcome))
    }

    /// With several batches for a step, only the last is synchronised.
    fn begin_batch(&mut self, is_first: bool, is_last: bool) -> Result<()> {
        self.accumulating = (!is_last).then(|| self.ddp.unsynchronise());
        self.agreement.begin_batch();
        if is_last {
            self.agree()?;
        }
        self.optimizer.begin_batch(is_first, is_last)
    }

    fn end_batch(&mut self) {
        self.optimizer.end_batch();
        self.accumulating = None;
        self.agreement.end_batch();
    }

    fn batch_failed(&mut self, error: Error) -> Error {
        let error = self.optimizer.batch_failed(error);
        self.ddp.batch_failed(error)
    }

    fn replayed(&mut self, device: Device) -> Result<()> {
        self.ddp.replayed(device)?;
        self.optimizer.replayed(device)
    }
}
