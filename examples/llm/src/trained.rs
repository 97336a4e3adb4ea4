//! The optimizer of one process, or of several whose gradients are averaged.

use std::collections::BTreeMap;
use tch::{Device, Tensor};
use tch_extension::Result;
use tch_extension::amp::ScaledGradients;
#[cfg(feature = "distributed")]
use tch_extension::distributed::{DdpOptimizer, ShardedOptimizer};
use tch_extension::optim::{FusedOptimizer, Optimizer};

/// The state of an optimizer, by name.
pub type State = BTreeMap<String, Tensor>;
/// The model's own weights in `Float`, by name.
pub type Masters<'a> = [(&'a str, &'a Tensor)];

/// An optimizer that `train::Step` steps.
pub trait Trained: Optimizer {
    fn set_lr(&mut self, lr: f64) -> Result<()>;

    /// The whole state, on the rank that `is_main`. All ranks call it. The masters get the values that
    /// the ranks have of them, and are no part of the state.
    fn whole_state(&self, is_main: bool, masters: &Masters<'_>) -> Result<Option<State>>;

    /// Takes over a state of [`Trained::whole_state`], also of another number of ranks. All ranks call it
    /// with the same state, after the weights and the masters have their values.
    fn load_state(&mut self, state: &State, masters: &Masters<'_>) -> Result<()>;

    /// What DDP has measured, if it averages the gradients.
    fn ddp_statistics(&self) -> Result<Option<serde_json::Value>> {
        Ok(None)
    }
}

impl Trained for FusedOptimizer {
    fn set_lr(&mut self, lr: f64) -> Result<()> {
        FusedOptimizer::set_lr(self, lr)
    }

    fn whole_state(&self, is_main: bool, _masters: &Masters<'_>) -> Result<Option<State>> {
        is_main.then(|| self.state_dict()).transpose()
    }

    fn load_state(&mut self, state: &State, _masters: &Masters<'_>) -> Result<()> {
        self.load_state_dict(state)
    }
}

#[cfg(feature = "distributed")]
impl Trained for DdpOptimizer<FusedOptimizer> {
    fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.get_mut().set_lr(lr)
    }

    fn whole_state(&self, is_main: bool, masters: &Masters<'_>) -> Result<Option<State>> {
        self.get_ref().whole_state(is_main, masters)
    }

    fn load_state(&mut self, state: &State, masters: &Masters<'_>) -> Result<()> {
        self.get_mut().load_state(state, masters)
    }

    fn ddp_statistics(&self) -> Result<Option<serde_json::Value>> {
        let found = self.ddp().statistics()?;
        let ms = |time: std::time::Duration| 1e3 * time.as_secs_f64();
        Ok(Some(serde_json::json!({
            "backward_ms": ms(found.backward),
            "communication_ms": ms(found.communication),
            "overlap_ms": ms(found.overlap),
            "overlap_share": found.overlap_share(),
            "bucket_bytes": found.buckets,
        })))
    }
}

/// The name of the master weights of a parameter in a state.
#[cfg(feature = "distributed")]
fn master_of(name: &str) -> String {
    format!("master.{name}")
}

#[cfg(feature = "distributed")]
impl Trained for ShardedOptimizer {
    fn set_lr(&mut self, lr: f64) -> Result<()> {
        ShardedOptimizer::set_lr(self, lr)
    }

    fn whole_state(&self, _is_main: bool, masters: &Masters<'_>) -> Result<Option<State>> {
        let Some(mut state) = self.gather_state_dict()? else { return Ok(None) };
        let _no_grad = tch::no_grad_guard();
        for (name, master) in masters {
            if let Some(values) = state.remove(&master_of(name)) {
                master.shallow_clone().f_copy_(&values)?;
            }
        }
        Ok(Some(state))
    }

    fn load_state(&mut self, state: &State, masters: &Masters<'_>) -> Result<()> {
        let own = state.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        let masters =
            masters.iter().map(|(name, master)| (master_of(name), master.shallow_clone()));
        self.load_state_dict(&own.chain(masters).collect())
    }
}

impl Optimizer for Box<dyn Trained> {
    fn parameters(&self) -> Vec<Tensor> {
        (**self).parameters()
    }

    fn step(&mut self) -> Result<()> {
        (**self).step()
    }

    fn capturable(&self) -> bool {
        (**self).capturable()
    }

    fn revision(&self) -> u64 {
        (**self).revision()
    }

    fn step_on_device(&mut self, gradients: ScaledGradients<'_>) -> Option<Result<Vec<Tensor>>> {
        (**self).step_on_device(gradients)
    }

    fn begin_batch(&mut self, is_first: bool, is_last: bool) -> Result<()> {
        (**self).begin_batch(is_first, is_last)
    }

    fn end_batch(&mut self) {
        (**self).end_batch();
    }

    fn batch_failed(&mut self, error: tch_extension::Error) -> tch_extension::Error {
        (**self).batch_failed(error)
    }

    fn replayed(&mut self, device: Device) -> Result<()> {
        (**self).replayed(device)
    }
}
