//! An optimizer that refuses gradients which are not averages of all ranks.

use super::Ddp;
use crate::amp::{Optimizer, ScaledGradients};
use crate::{Error, Result};
use tch::{Device, Tensor};

/// An optimizer whose step is an error unless its gradients are the averages of all ranks:
/// [`Ddp::guard`] makes it. [`GradScaler`](crate::amp::GradScaler) and `train::Step` take it.
#[derive(Debug)]
pub struct DdpOptimizer<O> {
    ddp: Ddp,
    optimizer: O,
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
        Ok(DdpOptimizer { ddp, optimizer })
    }

    /// Applies the gradients.
    ///
    /// # Errors
    /// When a gradient was not averaged since it was computed, when there was no synchronised
    /// backward pass since the last step, or an error of the optimizer. This rank then gives the
    /// group up, because the others may have stepped.
    pub fn step(&mut self) -> Result<()> {
        let DdpOptimizer { ddp, optimizer } = self;
        ddp.guarded(|| optimizer.step())
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
        let DdpOptimizer { ddp, optimizer } = self;
        if let Err(error) = ddp.check_for_step() {
            return Some(Err(error));
        }
        let outcome = optimizer.step_on_device(gradients)?;
        Some(ddp.stepped(outcome))
    }

    /// With several batches for a step, only the last is synchronised.
    fn begin_batch(&mut self, is_first: bool, is_last: bool) -> Result<()> {
        self.ddp.set_accumulating(!is_last);
        self.optimizer.begin_batch(is_first, is_last)
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
