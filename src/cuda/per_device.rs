//! Answers of GPUs that are asked for only once.

use super::{Device, DeviceGuard};
use crate::{Error, Result};
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;

/// The answers by device index. A device beyond the last entry is asked each time.
pub(crate) struct PerDevice<T>([OnceLock<T>; 64]);

impl<T: Copy + Default> PerDevice<T> {
    pub const fn new() -> Self {
        Self([const { OnceLock::new() }; 64])
    }

    /// The answer of a GPU, or the default for any other device. `ask` gets the device's index,
    /// while that device is current, and fills in the answer or returns what went wrong.
    pub fn of(
        &self,
        op: &str,
        device: impl Into<Device>,
        ask: impl FnOnce(i32, &mut T) -> Option<&'static CStr>,
    ) -> Result<T> {
        let device = device.into();
        let Device::Cuda(index) = device else { return Ok(T::default()) };
        let known = self.0.get(index);
        if let Some(answer) = known.and_then(OnceLock::get) {
            return Ok(*answer);
        }
        let _guard = DeviceGuard::new(device)?;
        let mut answer = T::default();
        if let Some(reason) = ask(index as i32, &mut answer) {
            let reason = reason.to_string_lossy().into_owned();
            return Err(Error::Cuda { op: op.to_string(), reason });
        }
        Ok(*known.map_or(&answer, |known| known.get_or_init(|| answer)))
    }
}

/// The error text of the C side, if there is one.
///
/// # Safety
/// `text` must be null or a null-terminated constant.
pub(crate) unsafe fn constant(text: *const c_char) -> Option<&'static CStr> {
    // SAFETY: the caller guarantees a null pointer or a constant (see `# Safety`).
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}
