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
    pub order: SdpOrder,
    pub enabled: SdpEnabled,
}

/// Numbers of `at::SDPBackend`, first the one that is tried first.
pub(crate) type SdpOrder = [i64; BACKENDS];
/// Indexed by these numbers.
pub(crate) type SdpEnabled = [bool; BACKENDS];

unsafe extern "C" {
    fn tch_extension_sdp_backends_get(result: *mut SdpBackends) -> *mut c_char;
    fn tch_extension_sdp_backends_enable(enabled: *const bool) -> *mut c_char;
    fn tch_extension_sdp_backends_order(order: *const i64) -> *mut c_char;
    fn tch_extension_sdp_backends_settle() -> *mut c_char;
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

    /// Enables these and disables all others.
    pub(crate) fn enable(enabled: &SdpEnabled) -> Result<()> {
        // SAFETY: C++ reads the array, which has as many elements as it expects, during the call
        // only.
        check(unsafe { tch_extension_sdp_backends_enable(enabled.as_ptr()) })
    }

    /// Sets the order in which libtorch tries them.
    pub(crate) fn set_order(order: &SdpOrder) -> Result<()> {
        // SAFETY: C++ reads the array, which has as many elements as it expects, during the call
        // only. The numbers come from libtorch, perhaps in another order.
        check(unsafe { tch_extension_sdp_backends_order(order.as_ptr()) })
    }

    /// Lets libtorch set its own order, which it does only once, if there is a GPU.
    pub(crate) fn settle() -> Result<()> {
        // SAFETY: C++ takes nothing.
        check(unsafe { tch_extension_sdp_backends_settle() })
    }
}
