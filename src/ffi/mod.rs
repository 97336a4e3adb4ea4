//! What the bridges to libtorch and all operators' `kernels.rs` share: messages from C++, checked
//! pointers, and facts about tensors. No file here chooses how an operator is computed.

pub(crate) mod amp;
pub(crate) mod autograd;
#[cfg(tch_extension_cuda)]
pub(crate) mod cuda;
pub(crate) mod cuda_types;
pub(crate) mod define;
#[cfg(feature = "distributed")]
pub(crate) mod distributed;
pub(crate) mod exceptions;
pub(crate) mod facts;
#[cfg(any(feature = "distributed", feature = "train"))]
pub(crate) mod gradients;
pub(crate) mod graph;
#[cfg(tch_extension_cuda)]
mod kernel;
pub(crate) mod library;
pub(crate) mod loader;
pub(crate) mod package;
pub(crate) mod pointers;
pub(crate) mod precision;
pub(crate) mod sdp_backends;
#[cfg(feature = "distributed")]
pub(crate) mod sharded;
pub(crate) mod sym_int;
pub(crate) mod tensor;
pub(crate) mod testing;
#[cfg(feature = "tvm_ffi")]
pub(crate) mod tvm_ffi;
mod value;

use crate::{Error, Result};
use memmap2::Mmap;
use std::ffi::{CStr, c_char, c_void};
use std::fs::File;
use tch::{Device, Kind, Tensor};
use tensor::Extent;

/// The bytes of a file, which are read when they are used.
pub(crate) fn map(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the bytes are only read. No other process may change the file meanwhile, as the
    // documentation of those who call this says; this crate replaces files by renaming new ones, which
    // leaves mapped ones as they are.
    unsafe { Mmap::map(file) }
}

/// Copies an error message from C++ and frees it. A null pointer means success.
pub(crate) fn take_message(message: *mut c_char) -> Option<String> {
    if message.is_null() {
        return None;
    }
    // SAFETY: a non-null message is a NUL-terminated string; C++ allocated it and passed its
    // ownership to us.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    // SAFETY: we own `message`, and nothing uses it after this call.
    unsafe { autograd::tch_extension_free_message(message) };
    Some(text)
}

/// A text that C++ returns, or its error.
pub(crate) fn text(call: impl FnOnce(*mut *mut c_char) -> *mut c_char) -> Result<String> {
    let mut text = std::ptr::null_mut();
    match take_message(call(&mut text)) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(take_message(text).unwrap_or_default()),
    }
}

/// The address, for a kernel, of a tensor that is contiguous and has this shape, kind and device. Any other tensor
/// is a mistake inside this crate; it gives an error, so that it cannot become a wild pointer.
pub(crate) fn checked(
    name: &str,
    tensor: &Tensor,
    shape: &[i64],
    like: (Kind, Device),
) -> Result<*mut c_void> {
    tensor::array(tensor, like, Extent::Sizes(shape))
        .ok_or_else(|| unfit(name, tensor, shape, like))
}

/// [`checked`] for an array whose number of elements has to fit, but not its shape. Null for an absent
/// tensor.
pub(crate) fn flat(
    name: &str,
    tensor: Option<&Tensor>,
    numel: i64,
    like: (Kind, Device),
) -> Result<*mut c_void> {
    let Some(tensor) = tensor else { return Ok(std::ptr::null_mut()) };
    let extent = usize::try_from(numel).ok().map(Extent::Elements);
    let address = extent.and_then(|extent| tensor::array(tensor, like, extent));
    address.ok_or_else(|| unfit(name, tensor, &[numel], like))
}

#[cold]
fn unfit(name: &str, tensor: &Tensor, shape: &[i64], like: (Kind, Device)) -> Error {
    Error::msg(format!(
        "internal error: a kernel's {name} should be a contiguous {shape:?} of {like:?}, but is {}",
        tensor::describe(tensor)
    ))
}

/// [`checked`] for a tensor that may be absent; the address is then null.
pub(crate) fn optional_ptr(
    name: &str,
    tensor: Option<&Tensor>,
    shape: &[i64],
    like: (Kind, Device),
) -> Result<*mut c_void> {
    tensor.map_or(Ok(std::ptr::null_mut()), |tensor| checked(name, tensor, shape, like))
}

/// The number of this kind in `csrc/include/tch_extension/kind.h`, which is libtorch's. It is an
/// error if there are no kernels for the kind.
pub(crate) fn kind_code(kind: Kind) -> Result<i32> {
    match kind {
        Kind::Half => Ok(5),
        Kind::Float => Ok(6),
        Kind::Double => Ok(7),
        Kind::BFloat16 => Ok(15),
        other => Err(Error::msg(format!("internal error: there are no kernels for {other:?}"))),
    }
}

pub(crate) fn no_kernel(op: &str, device: Device) -> Error {
    Error::msg(format!("internal error: {op} has no kernel for {device:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_never_sees_what_it_could_not_read() {
        let like = (Kind::Float, Device::Cpu);
        let good = Tensor::zeros([2, 3], like);
        assert_eq!(checked("x", &good, &[2, 3], like).expect("fits"), good.data_ptr());
        assert!(optional_ptr("x", None, &[2, 3], like).expect("none").is_null());
        for bad in [
            Tensor::zeros([3, 2], like),
            Tensor::zeros([3, 2], like).transpose(0, 1),
            Tensor::zeros([2, 3], (Kind::Double, Device::Cpu)),
        ] {
            let error = checked("x", &bad, &[2, 3], like).expect_err("does not fit").to_string();
            assert!(error.contains("a kernel's x should be a contiguous [2, 3]"), "{error}");
        }
        assert!(kind_code(Kind::Int64).is_err());
        // Of a number of elements in any shape.
        assert_eq!(flat("x", Some(&good), 6, like).expect("fits"), good.data_ptr());
        assert!(flat("x", None, 6, like).expect("none").is_null());
        for (bad, numel) in [(&good, 5), (&good, -6), (&good.transpose(0, 1), 6)] {
            let error = flat("x", Some(bad), numel, like).expect_err("does not fit").to_string();
            assert!(error.contains(&format!("a kernel's x should be a contiguous [{numel}]")));
        }
        assert!(flat("x", Some(&good), 6, (Kind::Int, Device::Cpu)).is_err());
        assert!(flat("x", Some(&good), 6, (Kind::Float, Device::Cuda(0))).is_err());
    }
}
