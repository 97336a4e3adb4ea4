//! The optimizer of one process, or of several whose gradients are averaged.

use tch::{Device, Tensor};
use tch_extension::Result;
use tch_extension::amp::{Optimizer, ScaledGradients};
#[cfg(feature = "distributed")]
use tch_extension::distributed::DdpOptimizer;
use tch_extension::optim;

/// An optimizer that `train::Step` steps.
pub enum Trained {
    /// Of one process.
    Alone(optim::Optimizer),
    /// Of several.
    #[cfg(feature = "distributed")]
    Ddp(DdpOptimizer<optim::Optimizer>),
}

/// Calls a method of whichever it is.
macro_rules! of {
    ($self:ident, $optimizer:ident => $call:expr) => {
        match $self {
            Trained::Alone($optimizer) => $call,
            #[cfg(feature = "distributed")]
            Trained::Ddp($optimizer) => $call,
        }
    };
}

impl Trained {
    /// The optimizer itself, which has rates and states.
    pub fn inner(&self) -> &optim::Optimizer {
        match self {
            Trained::Alone(optimizer) => optimizer,
            #[cfg(feature = "distributed")]
            Trained::Ddp(optimizer) => optimizer.get_ref(),
        }
    }

    /// [`Trained::inner`], to change it.
    pub fn inner_mut(&mut self) -> &mut optim::Optimizer {
        match self {
            Trained::Alone(optimizer) => optimizer,
            #[cfg(feature = "distributed")]
            Trained::Ddp(optimizer) => optimizer.get_mut(),
        }
    }
}

impl Optimizer for Trained {
    fn parameters(&self) -> Vec<Tensor> {
        of!(self, optimizer => optimizer.parameters())
    }

    fn step(&mut self) -> Result<()> {
        of!(self, optimizer => Optimizer::step(optimizer))
    }

    fn capturable(&self) -> bool {
        of!(self, optimizer => optimizer.capturable())
    }

    fn revision(&self) -> u64 {
        of!(self, optimizer => optimizer.revision())
    }

    fn step_on_device(&mut self, gradients: ScaledGradients<'_>) -> Option<Result<Vec<Tensor>>> {
        of!(self, optimizer => optimizer.step_on_device(gradients))
    }

    fn begin_batch(&mut self, steps: bool) -> Result<()> {
        of!(self, optimizer => optimizer.begin_batch(steps))
    }

    fn replayed(&mut self, device: Device) -> Result<()> {
        of!(self, optimizer => optimizer.replayed(device))
    }
}
