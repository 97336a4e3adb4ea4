//! What a launcher in C++ returns.

use crate::{Error, Result};
use std::ffi::{CStr, c_char};

/// The return value of a launcher that is written with `tch_extension/launch.h`: whether its kernel
/// was launched.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchStatus {
    kernel: *const c_char,
    error: *const c_char,
}

impl LaunchStatus {
    /// No kernel was launched, and none had to be.
    pub(crate) fn of_nothing() -> Self {
        LaunchStatus { kernel: c"".as_ptr(), error: std::ptr::null() }
    }

    pub(crate) fn failed(kernel: &'static CStr, error: &'static CStr) -> Self {
        LaunchStatus { kernel: kernel.as_ptr(), error: error.as_ptr() }
    }

    pub(crate) fn is_error(&self) -> bool {
        !self.error.is_null()
    }

    pub(super) fn into_result(self) -> Result<()> {
        if self.error.is_null() {
            return Ok(());
        }
        // SAFETY: C++ and the functions above make this type of static, null-terminated texts.
        let text = |text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Err(Error::Launch { kernel: text(self.kernel), message: text(self.error) })
    }
}
