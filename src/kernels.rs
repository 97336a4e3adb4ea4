//! Declaring your own kernels, and calling them on the device that holds their tensors.
//!
//! [`kernels!`](crate::kernels!) makes a safe function of each kernel. The parameter struct is
//! written once, in Rust: the build script's `params` (of `tch-extension-build` with the feature
//! `headers`) declares it in C++.

use crate::strided::{Strided, StridedMut};
use crate::{Error, Result};
use tch::Device;

/// A field of a kernel's parameter struct: a tensor or a number.
///
/// A struct that [`kernels!`](crate::kernels!) names has only fields of such types.
pub trait Field {
    /// The device of the field's memory; `None` for a field without memory.
    fn device(&self) -> Option<Device>;

    /// Whether the field's memory is still that of its tensor.
    fn is_current(&self) -> bool {
        true
    }
}

impl<const N: usize> Field for Strided<'_, N> {
    fn device(&self) -> Option<Device> {
        Some(Strided::device(self))
    }

    fn is_current(&self) -> bool {
        Strided::is_current(self)
    }
}

impl<const N: usize> Field for StridedMut<'_, N> {
    fn device(&self) -> Option<Device> {
        Some(StridedMut::device(self))
    }

    fn is_current(&self) -> bool {
        StridedMut::is_current(self)
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
/// If the tensors are on several devices, if there is no tensor, or if a tensor has been given other
/// memory since its field was made.
#[doc(hidden)]
pub fn common_device(op: &str, fields: &[(&str, &dyn Field)]) -> Result<Device> {
    if let Some((name, _)) = fields.iter().find(|(_, field)| !field.is_current()) {
        let expected = "the memory and the shape that the tensor had";
        let hint = "make the parameters after what resizes tensors";
        return Err(Error::argument(op, name, expected, "other ones", hint));
    }
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

/// Where the CPU's kernels are, if they are not here.
#[cfg(feature = "open")]
pub(crate) const CPU_IS_ELSEWHERE: Option<&str> = None;

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

/// On the CPU, runs the first expression. On a CUDA device, launches with the second expression,
/// which gets libtorch's current stream on that device and returns a `LaunchStatus`.
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
/// This makes `fn forward(params: &Forward<'_>) -> Result<()>`. If the tensors are on the CPU, it
/// calls `my_ops_forward_cpu(const Forward*)`. If they are on a CUDA device, it launches
/// `my_ops_forward_cuda(const Forward*, cudaStream_t)` on libtorch's current stream. The pattern
/// names every field of the struct, so that no tensor is forgotten: all of them must be on one
/// device. In a build without CUDA only the first function has to exist.
///
/// The word `unsafe` is your promise, which is why a SAFETY comment belongs to it. You promise that
/// the two functions have these types, that they read and write only inside the sizes and strides
/// of the parameters' tensors, whatever the parameters are, and that they throw nothing. Whatever
/// else they require, they check themselves, or the function that calls them does.
///
/// A struct that is shared with C++ is `#[repr(C)]` and has a lifetime, because it borrows its
/// tensors as [`Strided`](crate::strided::Strided) and [`StridedMut`](crate::strided::StridedMut).
/// [`Field`](crate::kernels::Field) lists what else it may contain. The page
/// <https://github.com/tch-extension/tch-extension/blob/main/docs/write-an-operator.md> shows all of
/// it, starting from an empty crate.
///
/// # Errors
/// The functions fail if the tensors are on several devices, if there is no kernel for their
/// device, or if CUDA refuses the launch.
#[macro_export]
macro_rules! kernels {
    // The pattern `Forward { x, y, cap }` stays raw tokens until here. So the compiler's words about
    // it, such as those about a field that it lacks, point to the user's own line.
    (@params $params:ident $fields:tt) => { $params<'_> };
    (@device $op:literal $params:ident { $($field:ident),+ $(,)? }) => {
        $crate::kernels::common_device($op, &[$((stringify!($field), $field)),+])
    };
    (@device $op:literal $($pattern:tt)+) => {
        compile_error!(concat!(
            "kernels!: ", stringify!($($pattern)+), ": expected the name of each field, as in \
             `Forward { x, y }`, so that no tensor is forgotten"
        ))
    };
    (
        $op:literal:
        $(
            $(#[$attribute:meta])*
            $visibility:vis unsafe fn $name:ident($($pattern:tt)+) = $cpu:ident, $cuda:ident;
        )+
    ) => {
        $(
            $(#[$attribute])*
            $visibility fn $name(
                params: &$crate::kernels!(@params $($pattern)+),
            ) -> $crate::Result<()> {
                unsafe extern "C" {
                    fn $cpu(params: *const $crate::kernels!(@params $($pattern)+));
                    #[cfg(tch_extension_cuda)]
                    fn $cuda(
                        params: *const $crate::kernels!(@params $($pattern)+),
                        stream: *mut ::std::ffi::c_void,
                    ) -> $crate::cuda::LaunchStatus;
                }
                let $($pattern)+ = params;
                let device = $crate::kernels!(@device $op $($pattern)+)?;
                $crate::__on_device!(
                    $op,
                    device,
                    // SAFETY: the user of the macro promised this with `unsafe`; the tensors are
                    // borrowed, and `common_device` found them on the CPU.
                    unsafe { $cpu(params) },
                    // SAFETY: as above, but the tensors are on this CUDA device.
                    |stream| unsafe { $cuda(params, stream) }
                )
            }
        )+
    };
}

/// [`kernels!`](crate::kernels!) for parameters that are plain addresses: the functions get the
/// device from their caller and stay `unsafe`.
macro_rules! raw_kernels {
    ($op:expr; $($(#[$attribute:meta])* fn $name:ident($params:ty) = $cpu:ident, $cuda:ident;)+) => {
        $(
            $(#[$attribute])*
            unsafe fn $name(
                device: impl Into<tch::Device>,
                params: &$params,
            ) -> $crate::Result<()> {
                unsafe extern "C" {
                    fn $cpu(params: *const $params);
                    #[cfg(tch_extension_cuda)]
                    fn $cuda(
                        params: *const $params,
                        stream: *mut std::ffi::c_void,
                    ) -> $crate::cuda::LaunchStatus;
                }
                let device: tch::Device = device.into();
                $crate::__on_device!(
                    $op,
                    device,
                    // SAFETY: the caller promises that the parameters describe memory of the CPU.
                    unsafe { $cpu(params) },
                    // SAFETY: the caller promises that the parameters describe memory of this
                    // device. libtorch's allocator gives that memory only to later work on the same
                    // stream.
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

    #[test]
    fn memory_that_was_released_is_no_parameter() {
        let like = (Kind::Float, Device::Cpu);
        let (x, mut y) = (Tensor::zeros([2], like), Tensor::zeros([2], like));
        let (mut of_x, of_y) = (x.shallow_clone(), y.shallow_clone());
        let (reads, writes) =
            (Strided::<1>::new(&x).unwrap(), StridedMut::<1>::new(&mut y).unwrap());
        let refused = |name: &str| {
            let error = common_device("op", &[("x", &reads), ("y", &writes)]).unwrap_err();
            assert!(error.to_string().starts_with(&format!("op: {name}: expected the memory")));
        };
        assert!(common_device("op", &[("x", &reads), ("y", &writes)]).is_ok());
        let _ = of_y.shallow_clone().resize_([1 << 20]);
        refused("y");
        of_x.set_data(&Tensor::zeros([2], like));
        refused("x");
    }
}
