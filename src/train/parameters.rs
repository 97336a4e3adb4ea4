//! The parameters of a step, and which tensors are their gradients.

use crate::ffi::amp::identity;
use crate::ffi::gradients as ffi;
use crate::optim::Optimizer;
use crate::{Error, Result, check};
use tch::{Device, Tensor};

/// An optimizer's parameters, and what a graph was captured with: their addresses, and whether they
/// are trained.
#[derive(Debug)]
pub(super) struct Parameters {
    tensors: Vec<Tensor>,
    captured: Vec<(usize, bool)>,
}

impl Parameters {
    pub fn of(op: &str, optimizer: &impl Optimizer) -> Result<Parameters> {
        let tensors = optimizer.parameters();
        if tensors.is_empty() {
            let hint = "make the optimizer after the model";
            return Err(Error::argument(op, "optimizer", "at least one parameter", "none", hint));
        }
        for (place, tensor) in tensors.iter().enumerate() {
            check!(op, &format!("parameter {place}"), tensor).defined()?;
        }
        let captured = in_a_graph(&tensors).collect();
        Ok(Parameters { tensors, captured })
    }

    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The device of all parameters, or an error that says why they cannot be in one graph.
    pub fn device(&self, op: &str) -> Result<Device> {
        let device = self.first_device();
        match self.tensors.iter().map(Tensor::device).find(|other| *other != device) {
            None => Ok(device),
            Some(other) => Err(Error::argument(
                op,
                "optimizer",
                "parameters on one device",
                format!("parameters on {device:?} and {other:?}"),
                "set StepOptions::capture to false",
            )),
        }
    }

    pub fn first_device(&self) -> Device {
        self.tensors.first().map_or(Device::Cpu, Tensor::device)
    }

    /// Whether a parameter has other memory than before, as after `set_data` or `to_device`, or was
    /// frozen or unfrozen.
    pub fn have_changed(&self) -> bool {
        in_a_graph(&self.tensors).ne(self.captured.iter().copied())
    }

    /// Whether these are the optimizer's parameters, in the same order.
    pub fn are_of(&self, optimizer: &impl Optimizer) -> bool {
        let now = optimizer.parameters();
        now.iter().map(identity).eq(self.tensors.iter().map(identity))
    }

    /// The gradients; an absent one is undefined.
    pub fn gradients(&self) -> Result<Vec<Tensor>> {
        self.tensors.iter().map(|tensor| Ok(tensor.f_grad()?)).collect()
    }

    pub fn remove_gradients(&self) -> Result<()> {
        ffi::remove_gradients(&self.tensors)
    }

    /// Makes these the gradients. They must come from [`Parameters::gradients`].
    pub fn set_gradients(&self, gradients: &[Tensor]) -> Result<()> {
        ffi::set_gradients(&self.tensors, gradients, false)
    }

    /// As [`Parameters::set_gradients`], after a replay that changed the parameters, which autograd
    /// does not see otherwise.
    pub fn set_gradients_of_step(&self, gradients: &[Tensor]) -> Result<()> {
        ffi::set_gradients(&self.tensors, gradients, true)
    }
}

fn in_a_graph(tensors: &[Tensor]) -> impl Iterator<Item = (usize, bool)> {
    tensors.iter().map(|tensor| (tensor.data_ptr().addr(), tensor.requires_grad()))
}

/// Whether both lists hold the same tensors, or none at the same places.
pub(super) fn are_same(left: &[Tensor], right: &[Tensor]) -> bool {
    left.iter().map(identity).eq(right.iter().map(identity))
}
