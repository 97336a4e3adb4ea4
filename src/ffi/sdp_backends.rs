//! Bindings to `csrc/nn/sdp_backends.cpp`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;

/// The number of libtorch's back ends. C++ compares it with libtorch's own.
const BACKENDS: usize = 5;

/// libtorch's settings, as `csrc/nn/sdp_backends.cpp` defines them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SdpBackends {
    /// Numbers of `at::SDPBackend`, first the one that is tried first.
    pub order: [i64; BACKENDS],
    /// Indexed by these numbers.
    pub enabled: [bool; BACKENDS],
}

unsafe extern "C" {
    fn tch_extension_sdp_backends_get(result: *mut SdpBackends) -> *mut c_char;
    fn tch_extension_sdp_backends_set(backends: *const SdpBackends) -> *mut c_char;
}

fn check(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |text| Err(Error::Torch(text)))
}

impl SdpBackends {
    pub(crate) fn get() -> Result<Self> {
        let mut backends = SdpBackends::default();
        // SAFETY: C++ writes `backends`, which has its layout, during the call only.
        check(unsafe { tch_extension_sdp_backends_get(&mut backends) }).map(|()| backends)
    }

    pub(crate) fn set(&self) -> Result<()> {
        // SAFETY: C++ reads `self`, which has its layout, during the call only. The numbers in
        // `order` come from libtorch, perhaps in another order.
        check(unsafe { tch_extension_sdp_backends_set(self) })
    }
}
