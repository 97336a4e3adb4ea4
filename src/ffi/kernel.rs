//! Bindings to `csrc/cuda/kernel.cpp`.
//!
//! `src/cuda/absent.rs` defines the same names for a build without CUDA.

use super::cuda::{check, message_line};
use super::cuda_types::{LaunchFacts, LaunchGrid};
use super::take_message;
use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

/// The most parameters whose sizes are asked for.
const SIZES: usize = 1024;

/// `KernelFacts` of `csrc/cuda/kernel.cpp`.
#[repr(C)]
struct KernelFacts {
    capability: i32,
    max_threads: i32,
    static_shared: i64,
    max_shared: i64,
    params: i64,
    sizes: [i64; SIZES],
}

#[doc(alias = "::CUlib_st")]
type CLibrary = c_void;

#[doc(alias = "::CUkern_st")]
type CKernel = c_void;

#[doc(alias = "::CUstream_st")]
type CStream = c_void;

unsafe extern "C" {
    fn tch_extension_cuda_library_load(
        image: *const c_void,
        library: *mut *mut CLibrary,
    ) -> *mut c_char;
    fn tch_extension_cuda_library_kernel(
        library: *mut CLibrary,
        name: *const c_char,
        kernel: *mut *mut CKernel,
    ) -> *mut c_char;
    fn tch_extension_cuda_library_names(library: *mut CLibrary) -> *mut c_char;
    fn tch_extension_cuda_kernel_prepare(
        kernel: *mut CKernel,
        device: i32,
        facts: *mut KernelFacts,
    ) -> *mut c_char;
    fn tch_extension_cuda_kernel_launch(
        kernel: *mut CKernel,
        device: i32,
        grid: *const LaunchGrid,
        params: *mut *mut c_void,
        stream: *mut CStream,
    ) -> *mut c_char;
}

/// A `cudaLibrary_t`, which is never unloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LibraryHandle(*mut c_void);

// SAFETY: it only identifies a library, and any thread may call CUDA's functions on libraries.
unsafe impl Send for LibraryHandle {}

impl LibraryHandle {
    /// Loads an image.
    ///
    /// # Safety
    /// CUDA must not read beyond the end of `image`: it is a cubin or a fatbin whose extent was
    /// checked, or a text that ends with a zero.
    pub(crate) unsafe fn load(op: &str, image: &[u8]) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: as the caller guarantees. CUDA copies the image, and C++ writes `raw` on success.
        check(op, unsafe { tch_extension_cuda_library_load(image.as_ptr().cast(), &mut raw) })
            .map(|()| LibraryHandle(raw))
    }

    /// Returns `None` if there is no kernel of this name.
    pub(crate) fn kernel(self, op: &str, name: &CStr) -> Result<Option<KernelHandle>> {
        let mut raw = null_mut();
        // SAFETY: the library is loaded, and C++ writes `raw` on success.
        check(op, unsafe { tch_extension_cuda_library_kernel(self.0, name.as_ptr(), &mut raw) })?;
        Ok((!raw.is_null()).then_some(KernelHandle(raw)))
    }

    /// The names of its kernels, separated by ", ", if CUDA tells them.
    pub(crate) fn names(self) -> Option<String> {
        // SAFETY: the library is loaded.
        take_message(unsafe { tch_extension_cuda_library_names(self.0) })
    }
}

/// A `cudaKernel_t` of a library that is never unloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelHandle(*mut c_void);

// SAFETY: it only identifies a kernel, and any thread may call CUDA's functions on kernels.
unsafe impl Send for KernelHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for KernelHandle {}

impl KernelHandle {
    /// Loads the kernel on `device`, which must be current. A failure comes with the device's
    /// compute capability, as far as it is known.
    pub(crate) fn prepare(self, device: i32) -> std::result::Result<LaunchFacts, (String, i32)> {
        let mut facts = KernelFacts {
            capability: 0,
            max_threads: 0,
            static_shared: 0,
            max_shared: 0,
            params: 0,
            sizes: [0; SIZES],
        };
        // SAFETY: the kernel is loaded, and C++ writes only `facts`.
        let message = unsafe { tch_extension_cuda_kernel_prepare(self.0, device, &mut facts) };
        if let Some(text) = take_message(message) {
            return Err((message_line(&text).to_string(), facts.capability));
        }
        let params = usize::try_from(facts.params).ok();
        let known = params.unwrap_or(0).min(SIZES);
        let sizes = facts.sizes[..known].iter().map(|size| *size as usize).collect();
        Ok(LaunchFacts {
            capability: facts.capability,
            max_threads: facts.max_threads.unsigned_abs(),
            static_shared: facts.static_shared.unsigned_abs(),
            max_shared: facts.max_shared.unsigned_abs(),
            params,
            sizes,
        })
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// `device` is current and `stream` is one of its streams. `params` are the addresses of what
    /// the kernel takes, in number and sizes, and the kernel may run with these.
    pub(crate) unsafe fn launch(
        self,
        name: &str,
        device: i32,
        grid: &LaunchGrid,
        params: &mut [*const c_void],
        stream: *mut c_void,
    ) -> Result<()> {
        // SAFETY: as the caller guarantees. The kernel is loaded, and CUDA copies the parameters
        // before it returns.
        let message = unsafe {
            tch_extension_cuda_kernel_launch(
                self.0,
                device,
                grid,
                params.as_mut_ptr().cast(),
                stream,
            )
        };
        match take_message(message) {
            None => Ok(()),
            Some(text) => Err(Error::Launch {
                kernel: name.to_string(),
                message: message_line(&text).to_string(),
            }),
        }
    }
}
