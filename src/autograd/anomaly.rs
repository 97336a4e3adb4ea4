//! Finds the forward pass of a failing backward pass: `torch.autograd.detect_anomaly`.

use crate::ffi::autograd as ffi;

/// A guard that keeps anomaly mode on until it is dropped.
#[must_use = "anomaly mode lasts until the guard is dropped; `let _ =` drops it at once"]
pub struct DetectAnomaly {
    before: ffi::AnomalySetting,
}

/// Switches anomaly mode on until the guard is dropped, as `torch.autograd.detect_anomaly` does in
/// Python. Each graph node remembers where its forward pass was called, and a backward pass that
/// fails reports that place. With `check_nan`, a backward pass that produces NaN fails.
///
/// The error of [`backward`](super::backward()), [`grad()`](super::grad()) or a failing operator
/// contains the place. For operators of this crate it is a Rust backtrace (build with line tables,
/// as cargo's `dev` profile does); for libtorch's own operators it is what libtorch reports. tch's
/// own `Tensor::backward` prints it to stderr. The mode holds for the whole process and makes every
/// forward pass slow, so use it only to find a mistake. If several threads hold guards at once,
/// drop the guards in reverse order.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::autograd::{apply_with, backward, detect_anomaly};
///
/// let guard = detect_anomaly(true);
/// let x = Tensor::from_slice(&[1.0]).set_requires_grad(true);
/// let y = apply_with(
///     "lost",
///     &[Some(&x)],
///     |_, inputs| Ok(inputs.get(0)?.copy().into()),
///     |_, grads| Ok((grads.get(0)? * f64::NAN).into()),
/// )?
/// .single()?;
/// let error = backward(&[&y], &Default::default()).unwrap_err().to_string();
/// assert!(error.contains("lostBackward") && error.contains("nan"), "{error}");
/// assert!(error.contains("The forward that made it was called here"), "{error}");
/// # drop(guard);
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub fn detect_anomaly(check_nan: bool) -> DetectAnomaly {
    let setting = ffi::AnomalySetting { enabled: true, check_nan };
    DetectAnomaly { before: ffi::tch_extension_set_anomaly_mode(setting) }
}

impl Drop for DetectAnomaly {
    fn drop(&mut self) {
        ffi::tch_extension_set_anomaly_mode(self.before);
    }
}
