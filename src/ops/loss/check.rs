//! The checks of arguments that the losses share.

use super::kernels::wrong_target;
use crate::operator::{Dim, Meta};
use crate::view::view;
use crate::{Error, Result};
use tch::{Device, Kind, Reduction, Tensor};

/// The kinds of logits, and of what they are made of.
pub(crate) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Refuses options that mean nothing.
pub(crate) fn check_options(op: &str, reduction: Reduction, label_smoothing: f64) -> Result<()> {
    if !(0.0..=1.0).contains(&label_smoothing) {
        let got = label_smoothing.to_string();
        return Err(Error::argument(op, "label_smoothing", "a number from 0 to 1", &got, ""));
    }
    if matches!(reduction, Reduction::Other(_)) {
        let got = format!("{reduction:?}");
        return Err(Error::argument(op, "reduction", "None, Mean or Sum", &got, ""));
    }
    Ok(())
}

/// The loss of an input's rows, of the input's kind, once the shape of their targets, such as `[M]`, is
/// checked.
pub(crate) fn loss<D: Dim>(
    input: &Meta<D>,
    target: &Meta<D>,
    shape: &str,
    reduction: Reduction,
) -> Result<Meta<D>> {
    let rows = &input.sizes()[..1];
    target.same_device_as(input)?.kind_in(&[Kind::Int64])?.shape(shape, rows)?;
    Ok(input.sized(if reduction == Reduction::None { rows } else { &[] }))
}

/// On the CPU, refuses a target that is no class. On CUDA the kernel stops the program.
pub(crate) fn check_target(
    op: &str,
    target: &Tensor,
    classes: i64,
    ignore_index: i64,
) -> Result<()> {
    if target.device() != Device::Cpu {
        return Ok(());
    }
    let all = view::<i64, 1>(target)?;
    let Some((at, wrong)) = wrong_target(all.iter(), classes, ignore_index) else {
        return Ok(());
    };
    let last = classes - 1;
    let expected = format!("classes from 0 to V - 1 = {last}, or ignore_index {ignore_index}");
    Err(Error::argument(op, "target", expected, format!("{wrong} at {at}"), ""))
}
