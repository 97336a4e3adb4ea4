//! What GPUs are asked only once.

use crate::cuda::DeviceGuard;
use crate::{Error, Result};
use std::ffi::{CStr, c_char};
use std::sync::OnceLock;
use tch::Device;

/// What each device answered. Those beyond the last place are asked each time.
pub(crate) struct OnceADevice<T>([OnceLock<T>; 64]);

impl<T: Copy + Default> OnceADevice<T> {
    pub const fn new() -> Self {
        Self([const { OnceLock::new() }; 64])
    }

    /// The answer of a GPU, which is current while it is asked by its number; the default of any
    /// other device. `ask` fills it in, or says what went wrong.
    pub fn of(
        &self,
        op: &str,
        device: Device,
        ask: impl FnOnce(i32, &mut T) -> Option<&'static CStr>,
    ) -> Result<T> {
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

/// What the C side says went wrong.
///
/// # Safety
/// `text` is null or a constant.
pub(crate) unsafe fn constant(text: *const c_char) -> Option<&'static CStr> {
    // SAFETY: as the caller promises.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
}
