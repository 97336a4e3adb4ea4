//! The optimizer of one process, or of several whose gradients are averaged.

use std::collections::BTreeMap;
use tch::{Device, Tensor};
use tch_extension::Result;
use tch_extension::amp::ScaledGradients;
#[cfg(feature = "distributed")]
use tch_extension::distributed::{DdpOptimizer, ShardedOptimizer};
use tch_extension::optim;
use tch_extension::optim::Optimizer;

/// An optimizer that `train::Step` steps.
pub enum Trained {
    /// Of one process.
    Alone(optim::FusedOptimizer),
    /// Of several, each with the whole state.
    #[cfg(feature = "distributed")]
    Ddp(DdpOptimizer<optim::FusedOptimizer>),
    /// Of several, each with a part of the state.
    #[cfg(feature = "distributed")]
    Sharded(Box<ShardedOptimizer>),
}

/// The state of an optimizer, by name.
pub type State = BTreeMap<String, Tensor>;

/// The name of the master weights of a parameter in a state.
#[cfg(feature = "distributed")]
fn master_of(name: &str) -> String {
    format!("master.{name}")
}

/// Calls a method of whichever it is.
macro_rules! of {
    ($self:ident, $optimizer:ident => $call:expr) => {
        match $self {
            Trained::Alone($optimizer) => $call,
            #[cfg(feature = "distributed")]
            Trained::Ddp($optimizer) => $call,
            #[cfg(feature = "distributed")]
            Trained::Sharded($optimizer) => $call,
        }
    };
}

impl Trained {
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        match self {
            Trained::Alone(optimizer) => optimizer.set_lr(lr),
            #[cfg(feature = "distributed")]
            Trained::Ddp(optimizer) => optimizer.get_mut().set_lr(lr),
            #[cfg(feature = "distributed")]
            Trained::Sharded(optimizer) => optimizer.set_lr(lr),
        }
    }

    /// The whole state, on the rank that `is_main`. All ranks call it. `masters` are the model's own
    /// weights in `Float`, which get the values that the ranks have of them, and are no part of the
    /// state.
    #[cfg_attr(not(feature = "distributed"), expect(unused_variables))]
    pub fn state(&self, is_main: bool, masters: &[(&str, &Tensor)]) -> Result<Option<State>> {
        match self {
            Trained::Alone(optimizer) => optimizer.state_dict().map(Some),
            #[cfg(feature = "distributed")]
            Trained::Ddp(optimizer) => {
                is_main.then(|| optimizer.get_ref().state_dict()).transpose()
            }
            #[cfg(feature = "distributed")]
            Trained::Sharded(optimizer) => {
                let Some(mut state) = optimizer.gather_state_dict()? else { return Ok(None) };
                let _no_grad = tch::no_grad_guard();
                for (name, master) in masters {
                    if let Some(values) = state.remove(&master_of(name)) {
                        master.shallow_clone().f_copy_(&values)?;
                    }
                }
                Ok(Some(state))
            }
        }
    }

    /// Takes over a state of [`Trained::state`], also of another number of ranks. All ranks call it
    /// with the same state, after the weights and `masters` have their values.
    #[cfg_attr(not(feature = "distributed"), expect(unused_variables))]
    pub fn load_state(&mut self, state: &State, masters: &[(&str, &Tensor)]) -> Result<()> {
        match self {
            Trained::Alone(optimizer) => optimizer.load_state_dict(state),
            #[cfg(feature = "distributed")]
            Trained::Ddp(optimizer) => optimizer.get_mut().load_state_dict(state),
            #[cfg(feature = "distributed")]
            Trained::Sharded(optimizer) => {
                let own = state.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
                let masters =
                    masters.iter().map(|(name, master)| (master_of(name), master.shallow_clone()));
                optimizer.load_state_dict(&own.chain(masters).collect())
            }
        }
    }
}

impl Optimizer for Trained {
    fn parameters(&self) -> Vec<Tensor> {
        of!(self, optimizer => optimizer.parameters())
    }

    fn step(&mut self) -> Result<()> {
        match self {
            Trained::Alone(optimizer) => Optimizer::step(optimizer),
            #[cfg(feature = "distributed")]
            Trained::Ddp(optimizer) => optimizer.step(),
            #[cfg(feature = "distributed")]
            Trained::Sharded(optimizer) => optimizer.step(),
        }
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

    fn begin_batch(&mut self, is_first: bool, is_last: bool) -> Result<()> {
        of!(self, optimizer => optimizer.begin_batch(is_first, is_last))
    }

    fn end_batch(&mut self) {
        of!(self, optimizer => optimizer.end_batch())
    }

    fn batch_failed(&mut self, error: tch_extension::Error) -> tch_extension::Error {
        of!(self, optimizer => optimizer.batch_failed(error))
    }

    fn replayed(&mut self, device: Device) -> Result<()> {
        of!(self, optimizer => optimizer.replayed(device))
    }
}
