//! Kernels by the addresses of their parameters, on CUDA only.

/// Where the CPU's kernels are.
pub(crate) const CPU_IS_ELSEWHERE: Option<&str> = Some(
    "this library has kernels for CUDA only; for arrays on the CPU load the one of the Python package \
     tch-extension, whose path is tch_extension.open_library()",
);

/// As tch-extension's macro of this name, without kernels for the CPU.
macro_rules! raw_kernels {
    ($op:expr; $($(#[$attribute:meta])* fn $name:ident($params:ty) = $cpu:ident, $cuda:ident;)+) => {
        $(
            $(#[$attribute])*
            unsafe fn $name(
                device: $crate::ops::kinds::Device,
                params: &$params,
            ) -> $crate::Result<()> {
                unsafe extern "C" {
                    fn $cuda(
                        params: *const $params,
                        stream: *mut std::ffi::c_void,
                    ) -> $crate::cuda::LaunchStatus;
                }
                // SAFETY: the caller promises that the parameters describe memory of this device.
                $crate::cuda::launch(device, |stream| unsafe { $cuda(params, stream) })
            }
        )+
    };
}
pub(crate) use raw_kernels;
