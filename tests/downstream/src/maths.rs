//! The public headers at work: `csrc/maths`.

use std::ffi::{CStr, c_char, c_void};
use tch::{Device, Kind, Tensor};
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::{Error, Result, check};

/// `csrc/maths/maths.h`.
#[repr(C)]
struct Params<'a> {
    x: Strided<'a, 2>,
    y: StridedMut<'a, 2>,
    function: i32,
}

unsafe extern "C" {
    fn downstream_maths_cpu(params: *const Params<'_>) -> *mut c_char;
    #[cfg(tch_extension_cuda)]
    fn downstream_maths_cuda(
        params: *const Params<'_>,
        stream: *mut c_void,
    ) -> tch_extension::cuda::LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn downstream_twice_cuda(
        x: *const c_void,
        y: *mut c_void,
        len: i64,
        kind: i32,
        stream: *mut c_void,
    ) -> tch_extension::cuda::LaunchStatus;
    fn downstream_element(
        x: *const c_void,
        row: i64,
        column: i64,
        at_once: bool,
        value: *mut f32,
    ) -> *mut c_char;
    fn downstream_fits_in_32_bits(sizes: *const i64, strides: *const i64) -> bool;
    fn tch_extension_free_message(message: *mut c_char);
}

fn result(message: *mut c_char) -> Result<()> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: a non-null message is a terminated string, and it is ours.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    // SAFETY: it is not used again.
    unsafe { tch_extension_free_message(message) };
    Err(Error::msg(text))
}

/// The scalar functions, in C++'s order.
pub const FUNCTIONS: [&str; 16] = [
    "relu",
    "relu_grad",
    "silu",
    "silu_grad",
    "softplus",
    "softplus_grad",
    "gelu",
    "gelu_grad",
    "gelu_tanh",
    "gelu_tanh_grad",
    "sigmoid",
    "sigmoid_grad",
    "elu",
    "elu_grad",
    "tanh",
    "tanh_grad",
];

/// One of [`FUNCTIONS`] of each element of a matrix, written to another.
///
/// # Errors
/// On kinds that have no kernel, and when the matrices do not match.
pub fn maths(function: &str, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let index = FUNCTIONS.iter().position(|name| *name == function);
    let index = index.ok_or_else(|| Error::msg(format!("maths: there is no {function}")))?;
    let on_cpu = x.device() == Device::Cpu;
    let kinds: &[Kind] = if on_cpu {
        &[Kind::Float, Kind::Double]
    } else {
        &[Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double]
    };
    let x_check = check!("maths", x).defined()?.kind_in(kinds)?.dim(2, "[M, N]")?;
    check!("maths", y).defined()?.like(&x_check)?.shape("[M, N]", &x.size())?;
    let params = Params { x: Strided::new(x)?, y: StridedMut::new(y)?, function: index as i32 };
    match x.device() {
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => tch_extension::cuda::launch(device, |stream| {
            // SAFETY: both are matrices of the same shape and kind, on this device.
            unsafe { downstream_maths_cuda(&params, stream) }
        }),
        // SAFETY: as above.
        Device::Cpu => result(unsafe { downstream_maths_cpu(&params) }),
        device => Err(Error::msg(format!("maths: no kernel for {device:?}"))),
    }
}

/// Twice a contiguous tensor of kind Float on CUDA, at whatever address.
///
/// # Errors
/// When the launch fails.
#[cfg(tch_extension_cuda)]
pub fn twice(x: &Tensor, y: &mut Tensor) -> Result<()> {
    assert!(x.is_contiguous() && y.is_contiguous() && x.size() == y.size());
    assert!(x.kind() == Kind::Float && y.kind() == Kind::Float);
    let len = x.numel() as i64;
    // SAFETY: contiguous arrays of `len` floats.
    tch_extension::cuda::launch(x.device(), |stream| unsafe {
        downstream_twice_cuda(x.data_ptr(), y.data_ptr(), len, 6, stream)
    })
}

/// One element of a matrix of kind Float on the CPU, through `tensor.h`.
///
/// # Errors
/// On any other tensor; and in debug builds on an index out of range.
pub fn element(x: &Tensor, row: i64, column: i64, at_once: bool) -> Result<f32> {
    let mut value = 0.0;
    // SAFETY: a live tensor; C++ checks the rest.
    result(unsafe { downstream_element(x.as_ptr().cast(), row, column, at_once, &mut value) })?;
    Ok(value)
}

/// Whether 32 bits are enough for the indices of such a matrix.
pub fn fits_in_32_bits(sizes: [i64; 2], strides: [i64; 2]) -> bool {
    // SAFETY: two numbers each, as C++ expects.
    unsafe { downstream_fits_in_32_bits(sizes.as_ptr(), strides.as_ptr()) }
}
