//! `torch.autograd.detect_anomaly`.

use crate::ffi::autograd as ffi;

/// Anomaly mode, until dropped.
#[must_use = "anomaly mode lasts until the guard is dropped; `let _ =` drops it at once"]
pub struct DetectAnomaly {
    before: ffi::AnomalySetting,
}

/// Switches anomaly mode on until the guard is dropped: each node remembers where its forward was
/// called, and a backward that fails says so; with `check_nan`, a backward that gives NaN fails.
/// What `torch.autograd.detect_anomaly` is in Python.
///
/// The error of [`backward`](super::backward()), [`grad()`](super::grad()) or a failing operator
/// carries the place: for operators of this crate as a Rust backtrace (build with line tables, as
/// cargo's `dev` profile does), for libtorch's own as it reports it. tch's own `Tensor::backward`
/// prints it to stderr. The mode holds for the whole process and makes every forward slow: it is
/// for finding a mistake. Guards that several threads hold at once have to be dropped in the
/// reverse order.
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
