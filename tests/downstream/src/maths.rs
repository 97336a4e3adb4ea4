//! Uses the public headers through `csrc/maths`.

use std::ffi::{CStr, c_char, c_void};
use tch::{Device, Kind, Tensor};
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::{Error, Result, check};

/// Mirrors `MathsParams` in `csrc/maths/maths.h`.
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
    // SAFETY: C++ returns either null or a terminated string, which the caller owns.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    // SAFETY: the message came from C++ and is not used again.
    unsafe { tch_extension_free_message(message) };
    Err(Error::msg(text))
}

/// The names of the scalar functions, in the order of the C++ code.
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

/// Applies one of [`FUNCTIONS`] to each element of a matrix and writes the results to another.
///
/// # Errors
/// If there is no kernel for the kind, or if the matrices differ in shape, kind or device.
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
            // SAFETY: the checks above made sure that both are matrices of the same shape and kind
            // on this device.
            unsafe { downstream_maths_cuda(&params, stream) }
        }),
        // SAFETY: as for CUDA.
        Device::Cpu => result(unsafe { downstream_maths_cpu(&params) }),
        device => Err(Error::msg(format!("maths: no kernel for {device:?}"))),
    }
}

/// Doubles a contiguous tensor of kind Float on CUDA, at any alignment.
///
/// # Errors
/// If the launch fails.
#[cfg(tch_extension_cuda)]
pub fn twice(x: &Tensor, y: &mut Tensor) -> Result<()> {
    assert!(x.is_contiguous() && y.is_contiguous() && x.size() == y.size());
    assert!(x.kind() == Kind::Float && y.kind() == Kind::Float);
    let len = x.numel() as i64;
    // SAFETY: the assertions made sure that both are contiguous arrays of `len` floats.
    tch_extension::cuda::launch(x.device(), |stream| unsafe {
        downstream_twice_cuda(x.data_ptr(), y.data_ptr(), len, 6, stream)
    })
}

/// Reads one element of a matrix of kind Float on the CPU, with `tensor.h`.
///
/// # Errors
/// For any other tensor and, in debug builds, for an index out of range.
pub fn element(x: &Tensor, row: i64, column: i64, at_once: bool) -> Result<f32> {
    let mut value = 0.0;
    // SAFETY: `x` is a live tensor, and C++ checks everything else.
    result(unsafe { downstream_element(x.as_ptr().cast(), row, column, at_once, &mut value) })?;
    Ok(value)
}

/// Whether 32 bits are enough to index a matrix with these sizes and strides.
pub fn fits_in_32_bits(sizes: [i64; 2], strides: [i64; 2]) -> bool {
    // SAFETY: both arrays have two numbers, as the C++ function requires.
    unsafe { downstream_fits_in_32_bits(sizes.as_ptr(), strides.as_ptr()) }
}
