//! The part of libtorch's C shim that concerns CUDA, and CUDA's events.

use std::ffi::{c_char, c_void};

unsafe extern "C" {
    // libtorch's stable C shim (torch/csrc/inductor/aoti_torch/c/shim.h); 0 is success.
    pub(crate) fn aoti_torch_get_current_cuda_stream(device_index: i32, stream: *mut *mut c_void) -> i32;
    pub(crate) fn aoti_torch_create_cuda_guard(device_index: i32, guard: *mut *mut c_void) -> i32;
    pub(crate) fn aoti_torch_delete_cuda_guard(guard: *mut c_void) -> i32;

    // The CUDA runtime that libtorch loads.
    pub(crate) fn cudaEventCreate(event: *mut *mut c_void) -> i32;
    pub(crate) fn cudaEventRecord(event: *mut c_void, stream: *mut c_void) -> i32;
    pub(crate) fn cudaEventSynchronize(event: *mut c_void) -> i32;
    pub(crate) fn cudaEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) -> i32;
    pub(crate) fn cudaEventDestroy(event: *mut c_void) -> i32;
    pub(crate) safe fn cudaGetLastError() -> i32;
    pub(crate) safe fn cudaGetErrorString(error: i32) -> *const c_char;
}

/// A live reference into libtorch_cuda.so. Linkers drop a library that nothing refers to, and a program whose
/// own code names no CUDA function would find itself without a GPU: tch's oldest complaint.
#[used]
static KEEP_LIBTORCH_CUDA: unsafe extern "C" fn(i32, *mut *mut c_void) -> i32 =
    aoti_torch_get_current_cuda_stream;
