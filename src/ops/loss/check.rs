//! The checks of arguments that the losses share.

use crate::view::view;
use crate::{Error, Result};
use tch::{Device, Reduction, Tensor};

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

/// On the CPU, refuses a target that is no class. On CUDA the kernel stops the program.
pub(crate) fn check_targets(
    op: &str,
    targets: &Tensor,
    classes: i64,
    ignore_index: i64,
) -> Result<()> {
    if targets.device() != Device::Cpu {
        return Ok(());
    }
    let is_right = |target: i64| (0..classes).contains(&target) || target == ignore_index;
    let all = view::<i64, 1>(targets)?;
    let Some((at, wrong)) = all.iter().enumerate().find(|(_, target)| !is_right(*target)) else {
        return Ok(());
    };
    let last = classes - 1;
    let expected = format!("classes from 0 to V - 1 = {last}, or ignore_index {ignore_index}");
    Err(Error::argument(op, "targets", expected, format!("{wrong} at {at}"), ""))
}
