//! Bindings to `csrc/amp`.

use super::{autograd, take_message};
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// This thread's autocast setting for one type of device, as `csrc/amp/autocast.cpp` defines it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct AutocastSetting {
    kind: i32,
    enabled: bool,
}

unsafe extern "C" {
    // csrc/amp/autocast.cpp
    fn tch_extension_autocast_get(cuda: bool, result: *mut AutocastSetting) -> *mut c_char;
    fn tch_extension_autocast_set(cuda: bool, setting: *const AutocastSetting) -> *mut c_char;
    safe fn tch_extension_autocast_cache() -> bool;
    safe fn tch_extension_autocast_enter();
    safe fn tch_extension_autocast_leave() -> *mut c_char;
    safe fn tch_extension_autocast_clear() -> *mut c_char;

    fn tch_extension_cached_cast(
        tensor: *const C_tensor,
        kind: i32,
        cuda: bool,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;

    // csrc/amp/grad_scaler.cpp
    fn tch_extension_amp_unscale(
        gradients: *const *const C_tensor,
        len: usize,
        found_inf: *mut C_tensor,
        inverse_scale: *const C_tensor,
    ) -> *mut c_char;
    fn tch_extension_identity(tensor: *const C_tensor) -> *const c_void;
}

fn check(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |text| Err(Error::Torch(text)))
}

/// The kinds to which autocast may cast, with libtorch's numbers (c10/core/ScalarType.h).
const AUTOCAST_KINDS: [(Kind, i32); 2] = [(Kind::Half, 5), (Kind::BFloat16, 15)];

impl AutocastSetting {
    pub(crate) fn get(cuda: bool) -> Result<Self> {
        let mut setting = AutocastSetting { kind: 0, enabled: false };
        // SAFETY: C++ writes `setting` on success.
        check(unsafe { tch_extension_autocast_get(cuda, &mut setting) }).map(|()| setting)
    }

    pub(crate) fn set(&self, cuda: bool) -> Result<()> {
        // SAFETY: C++ reads `self` during the call. Its kind comes from libtorch or from
        // `AUTOCAST_KINDS`.
        check(unsafe { tch_extension_autocast_set(cuda, self) })
    }

    /// Autocast on with this kind, if autocast supports the kind.
    pub(crate) fn on(kind: Kind) -> Option<Self> {
        let (_, kind) = AUTOCAST_KINDS.into_iter().find(|known| known.0 == kind)?;
        Some(AutocastSetting { kind, enabled: true })
    }

    pub(crate) fn off(self) -> Self {
        AutocastSetting { enabled: false, ..self }
    }

    /// The kind, if autocast is on.
    pub(crate) fn kind(&self) -> Option<Kind> {
        AUTOCAST_KINDS
            .into_iter()
            .find(|known| self.enabled && known.1 == self.kind)
            .map(|known| known.0)
    }
}

/// Whether this thread's autocast caches the casts of weights.
pub(crate) fn autocast_cache() -> bool {
    tch_extension_autocast_cache()
}

pub(crate) fn set_autocast_cache(enabled: bool) {
    autograd::tch_extension_set_autocast_cache(enabled);
}

/// Enters one more autocast region in this thread.
pub(crate) fn enter_autocast() {
    tch_extension_autocast_enter();
}

/// Leaves one autocast region. Clears the cache of cast weights if it was the last.
pub(crate) fn leave_autocast() -> Result<()> {
    check(tch_extension_autocast_leave())
}

/// Clears the cache of cast weights.
#[cfg_attr(not(feature = "train"), allow(dead_code))]
pub(crate) fn clear_autocast_cache() -> Result<()> {
    check(tch_extension_autocast_clear())
}

/// Casts the tensor to this kind if autocast would cast it on this device: it must be of a
/// floating-point kind other than `Double`, and on that device.
pub(crate) fn cached_cast(tensor: &Tensor, kind: Kind, device: Device) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    let cuda = device != Device::Cpu;
    // SAFETY: the pointer is borrowed from a live, defined tensor, and C++ writes `result` on
    // success.
    check(unsafe {
        tch_extension_cached_cast(tensor.as_ptr(), super::kind_code(kind)?, cuda, &mut result)
    })?;
    // SAFETY: on success, `result` is a handle that we own.
    Ok(unsafe { Tensor::from_ptr(result) })
}

/// Multiplies gradients by `inverse_scale`, and sets `found_inf` if one of them was not finite. All
/// gradients have the same device and kind; `inverse_scale` and `found_inf` are scalars of kind
/// Float on that device. Does not wait for the device.
pub(crate) fn unscale(
    gradients: &[Tensor],
    found_inf: &mut Tensor,
    inverse_scale: &Tensor,
) -> Result<()> {
    let pointers: Vec<_> = gradients.iter().map(Tensor::as_ptr).collect();
    // SAFETY: all pointers are borrowed from live tensors. libtorch itself checks kinds, devices
    // and sizes.
    check(unsafe {
        tch_extension_amp_unscale(
            pointers.as_ptr().cast(),
            pointers.len(),
            found_inf.as_mut_ptr(),
            inverse_scale.as_ptr(),
        )
    })
}

/// A number that identifies the tensor. All handles of a tensor have the same one, and no other
/// tensor has it while one of them lives.
pub(crate) fn identity(tensor: &Tensor) -> usize {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { tch_extension_identity(tensor.as_ptr()) }.addr()
}
