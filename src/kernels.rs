//! Declaring your own kernels, and calling them on the device where their tensors are.
//!
//! [`kernels!`](crate::kernels!) makes a safe function of each kernel. Its parameter struct is typed
//! once, in Rust: the build script's `params` (of `tch-extension-build` with the feature `headers`)
//! declares it in C++.

use crate::strided::{Strided, StridedMut};
use crate::{Error, Result};
use tch::Device;

/// A field of a kernel's parameter struct: a tensor, or a number.
///
/// A struct that [`kernels!`](crate::kernels!) names has such fields only.
pub trait Field {
    /// Where the field's memory is; `None` for a field without memory.
    fn device(&self) -> Option<Device>;
}

impl<const N: usize> Field for Strided<'_, N> {
    fn device(&self) -> Option<Device> {
        Some(Strided::device(self))
    }
}

impl<const N: usize> Field for StridedMut<'_, N> {
    fn device(&self) -> Option<Device> {
        Some(StridedMut::device(self))
    }
}

macro_rules! without_memory {
    ($($number:ty),+) => {
        $(impl Field for $number {
            fn device(&self) -> Option<Device> {
                None
            }
        }

        impl<const N: usize> Field for [$number; N] {
            fn device(&self) -> Option<Device> {
                None
            }
        })+
    };
}
without_memory!(f32, f64, i8, i16, i32, i64, u8, u16, u32, u64, bool);

/// The device that all tensors among the fields are on.
///
/// # Errors
/// When they are on several, or there is none.
#[doc(hidden)]
pub fn common_device(op: &str, fields: &[(&str, &dyn Field)]) -> Result<Device> {
    let mut tensors = fields.iter().filter_map(|(name, field)| Some((name, field.device()?)));
    let Some((first, device)) = tensors.next() else {
        return Err(Error::msg(format!("{op}: a kernel's parameters have no tensor")));
    };
    match tensors.find(|(_, other)| *other != device) {
        None => Ok(device),
        Some((name, other)) => Err(Error::argument(
            op,
            name,
            format!("device {device:?}, as {first}"),
            format!("{other:?}"),
            format!("move it with to_device(Device::{device:?})"),
        )),
    }
}

/// The error for a device that has no kernel.
#[doc(hidden)]
pub fn no_kernel(op: &str, device: Device) -> Error {
    let reason = if crate::cuda::is_compiled() {
        "there are kernels for the CPU and CUDA only"
    } else {
        "this build has no CUDA kernels; build with a libtorch that has CUDA and an nvcc \
         (cargo xtask doctor says what is missing)"
    };
    Error::msg(format!("{op}: no kernel for {device:?}: {reason}"))
}

/// Runs the first expression on the CPU. On a CUDA device it launches with the second one, which
/// gets libtorch's current stream there and returns a `LaunchStatus`.
#[doc(hidden)]
#[macro_export]
macro_rules! __on_device {
    ($op:expr, $device:expr, $cpu:expr, |$stream:ident| $cuda:expr) => {
        match $device {
            #[cfg(tch_extension_cuda)]
            device @ $crate::tch::Device::Cuda(_) => $crate::cuda::launch(device, |$stream| $cuda),
            $crate::tch::Device::Cpu => {
                $cpu;
                $crate::Result::Ok(())
            }
            device => $crate::Result::Err($crate::kernels::no_kernel($op, device)),
        }
    };
}

/// Declares `extern "C"` kernels and makes a safe function of each.
///
/// ```text
/// tch_extension::kernels! {
///     // SAFETY: why it is sound to call these functions with any such parameters.
///     "name of the operator":
///     /// Documentation.
///     unsafe fn forward(Forward { x, y, cap }) = my_ops_forward_cpu, my_ops_forward_cuda;
/// }
/// ```
///
/// This makes `fn forward(params: &Forward<'_>) -> Result<()>`. It calls
/// `my_ops_forward_cpu(const Forward*)` if the tensors are on the CPU, and launches
/// `my_ops_forward_cuda(const Forward*, cudaStream_t)` on libtorch's current stream if they are on
/// a CUDA device. The pattern names every field of the struct, so that no tensor is forgotten: all
/// of them have to be on one device. Without CUDA in the build only the first name has to exist.
///
/// The word `unsafe` is a promise of yours, which is why it comes with a SAFETY comment: the two
/// functions have these types, they read and write only inside the sizes and strides of the
/// parameters' tensors, whatever the parameters are, and they throw nothing. They check what else
/// they need themselves, or the function that calls them does.
///
/// A struct that C++ shares is `#[repr(C)]` and has a lifetime, because it borrows its tensors as
/// [`Strided`](crate::strided::Strided) and [`StridedMut`](crate::strided::StridedMut); see
/// [`Field`](crate::kernels::Field) for what else it may contain. The whole of it, from an empty
/// crate on, is in docs/write-an-operator.md.
///
/// # Errors
/// The functions fail if the tensors are on several devices or on one without a kernel, and if
/// CUDA refuses the launch.
#[macro_export]
macro_rules! kernels {
    (
        $op:literal:
        $(
            $(#[$attribute:meta])*
            $visibility:vis unsafe fn $name:ident($params:ident { $($field:ident),+ $(,)? })
                = $cpu:ident, $cuda:ident;
        )+
    ) => {
        $(
            $(#[$attribute])*
            $visibility fn $name(params: &$params<'_>) -> $crate::Result<()> {
                unsafe extern "C" {
                    fn $cpu(params: *const $params<'_>);
                    #[cfg(tch_extension_cuda)]
                    fn $cuda(
                        params: *const $params<'_>,
                        stream: *mut ::std::ffi::c_void,
                    ) -> $crate::cuda::LaunchStatus;
                }
                let $params { $($field),+ } = params;
                let device =
                    $crate::kernels::common_device($op, &[$((stringify!($field), $field)),+])?;
                $crate::__on_device!(
                    $op,
                    device,
                    // SAFETY: the promise that comes with the macro's `unsafe`; the tensors are
                    // borrowed, and on the CPU.
                    unsafe { $cpu(params) },
                    // SAFETY: as above; the tensors are on this device.
                    |stream| unsafe { $cuda(params, stream) }
                )
            }
        )+
    };
}

/// [`kernels!`](crate::kernels!) for parameters that are plain addresses: the functions get the
/// device from their caller, and stay `unsafe`.
macro_rules! raw_kernels {
    ($op:expr; $($(#[$attribute:meta])* fn $name:ident($params:ty) = $cpu:ident, $cuda:ident;)+) => {
        $(
            $(#[$attribute])*
            unsafe fn $name(device: tch::Device, params: &$params) -> $crate::Result<()> {
                unsafe extern "C" {
                    fn $cpu(params: *const $params);
                    #[cfg(tch_extension_cuda)]
                    fn $cuda(
                        params: *const $params,
                        stream: *mut std::ffi::c_void,
                    ) -> $crate::cuda::LaunchStatus;
                }
                $crate::__on_device!(
                    $op,
                    device,
                    // SAFETY: the caller promises that the parameters describe memory of the CPU.
                    unsafe { $cpu(params) },
                    // SAFETY: the caller promises that they describe memory of this device, and
                    // libtorch's allocator gives it to later work on the same stream only.
                    |stream| unsafe { $cuda(params, stream) }
                )
            }
        )+
    };
}
pub(crate) use raw_kernels;

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Kind, Tensor};

    #[test]
    fn one_device_is_found_among_the_fields() {
        let (x, y) = (Tensor::zeros([2], (Kind::Float, Device::Cpu)), 1.0_f64);
        let strided = Strided::<1>::new(&x).unwrap();
        let of = |fields: &[(&str, &dyn Field)]| common_device("op", fields);
        assert_eq!(of(&[("cap", &y), ("x", &strided), ("y", &strided)]).unwrap(), Device::Cpu);
        let error = of(&[("cap", &y)]).unwrap_err().to_string();
        assert!(error.contains("op: a kernel's parameters have no tensor"), "{error}");
        struct OnTheGpu;
        impl Field for OnTheGpu {
            fn device(&self) -> Option<Device> {
                Some(Device::Cuda(1))
            }
        }
        let error = of(&[("x", &strided), ("y", &OnTheGpu)]).unwrap_err().to_string();
        assert_eq!(
            error,
            "op: y: expected device Cpu, as x, got Cuda(1); move it with to_device(Device::Cpu)"
        );
    }
}
