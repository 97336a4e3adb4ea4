//! The gradients of parameters, grouped for the calls that unscale them.

use crate::{Result, check};
use tch::{Device, Kind, Tensor};

/// Gradients that libtorch can unscale in one call.
pub(super) struct Group {
    pub device: Device,
    pub kind: Kind,
    pub gradients: Vec<Tensor>,
}

pub(super) fn groups_of_gradients(op: &str, parameters: &[Tensor]) -> Result<Vec<Group>> {
    let mut groups: Vec<Group> = Vec::new();
    for (place, parameter) in parameters.iter().enumerate() {
        let gradient = parameter.f_grad()?;
        if !gradient.defined() {
            continue;
        }
        let gradient = values_of(op, place, gradient)?;
        let (device, kind) = (gradient.device(), gradient.f_kind()?);
        match groups.iter_mut().find(|group| group.device == device && group.kind == kind) {
            Some(group) => group.gradients.push(gradient),
            None => groups.push(Group { device, kind, gradients: vec![gradient] }),
        }
    }
    Ok(groups)
}

/// The values of a gradient, in the gradient's own memory.
fn values_of(op: &str, place: usize, gradient: Tensor) -> Result<Tensor> {
    let name = format!("the gradient of parameter {place}");
    let gradient = if gradient.is_sparse() { gradient.f_internal_values()? } else { gradient };
    let checked = check!(op, &name, gradient).defined()?;
    // The kinds for which libtorch has kernels.
    let (kinds, expected) = match gradient.device() {
        Device::Cpu => {
            (&[Kind::Float, Kind::Double, Kind::BFloat16][..], "kind Float, Double or BFloat16")
        }
        _ => (&[Kind::Float, Kind::Double][..], "kind Float or Double"),
    };
    let kind = gradient.f_kind()?;
    if matches!(kind, Kind::Half | Kind::BFloat16) && !kinds.contains(&kind) {
        let hint = "keep the weights in Float, and let Autocast cast them";
        return Err(checked.refuse(expected, format!("{kind:?}, which cannot be unscaled"), hint));
    }
    checked.kind_in(kinds)?;
    Ok(gradient)
}

/// Copies a tensor to a device. The copy to a GPU is asynchronous; the copy to the CPU waits,
/// because the value is read next.
pub(super) fn moved(tensor: &Tensor, device: Device) -> Result<Tensor> {
    Ok(tensor.f_to_device_(device, tensor.f_kind()?, device != Device::Cpu, false)?)
}
