//! Replaces `ffi::cuda` in a build without CUDA: every function returns an error, and the handles
//! cannot exist.

use super::not_compiled;
use crate::Result;
use crate::ffi::cuda_types::{DeviceProperties, LaunchFacts, LaunchGrid, MemoryStats, StreamParts};
use std::ffi::{CStr, c_void};
use tch::Tensor;

#[derive(Debug)]
pub(crate) enum LaunchPlace {}

impl LaunchPlace {
    pub(crate) fn enter(op: &str, _: i32) -> Result<Option<Self>> {
        Err(not_compiled(op))
    }

    pub(crate) fn stream(&self) -> *mut c_void {
        match *self {}
    }
}

pub(crate) fn current_stream(op: &str, _: i32) -> Result<StreamParts> {
    Err(not_compiled(op))
}

pub(crate) fn default_stream(op: &str, _: i32) -> Result<StreamParts> {
    Err(not_compiled(op))
}

pub(crate) fn pool_stream(op: &str, _: i32, _: bool) -> Result<StreamParts> {
    Err(not_compiled(op))
}

pub(crate) fn synchronize_stream(op: &str, _: &StreamParts) -> Result<()> {
    Err(not_compiled(op))
}

pub(crate) fn stream_is_idle(op: &str, _: &StreamParts) -> Result<bool> {
    Err(not_compiled(op))
}

pub(crate) fn record_stream(op: &str, _: &Tensor, _: &StreamParts) -> Result<()> {
    Err(not_compiled(op))
}

pub(crate) fn synchronize(op: &str, _: i32) -> Result<()> {
    Err(not_compiled(op))
}

pub(crate) fn device_properties(op: &str, _: i32) -> Result<DeviceProperties> {
    Err(not_compiled(op))
}

pub(crate) fn version(op: &str) -> Result<i32> {
    Err(not_compiled(op))
}

pub(crate) fn memory_stats(op: &str, _: i32) -> Result<MemoryStats> {
    Err(not_compiled(op))
}

pub(crate) fn reset_peak_memory_stats(op: &str, _: i32) -> Result<()> {
    Err(not_compiled(op))
}

pub(crate) fn empty_cache(op: &str) -> Result<()> {
    Err(not_compiled(op))
}

pub(crate) fn is_capturing(op: &str) -> Result<bool> {
    Err(not_compiled(op))
}

pub(crate) fn capture_report() -> (Option<String>, Option<String>) {
    (None, None)
}

#[derive(Debug)]
pub(crate) enum DeviceGuardHandle {}

impl DeviceGuardHandle {
    pub(crate) fn new(op: &str, _: i32) -> Result<Self> {
        Err(not_compiled(op))
    }
}

#[derive(Debug)]
pub(crate) enum StreamGuardHandle {}

impl StreamGuardHandle {
    pub(crate) fn new(op: &str, _: &StreamParts) -> Result<Self> {
        Err(not_compiled(op))
    }
}

#[derive(Debug)]
pub(crate) enum EventHandle {}

impl EventHandle {
    pub(crate) fn new(op: &str, _: bool, _: bool) -> Result<Self> {
        Err(not_compiled(op))
    }

    pub(crate) fn record(&self, _: &str, _: &StreamParts) -> Result<()> {
        match *self {}
    }

    pub(crate) fn block(&self, _: &str, _: &StreamParts) -> Result<()> {
        match *self {}
    }

    pub(crate) fn synchronize(&self, _: &str) -> Result<()> {
        match *self {}
    }

    pub(crate) fn is_done(&self, _: &str) -> Result<bool> {
        match *self {}
    }

    pub(crate) fn milliseconds_until(&self, _: &str, _: &EventHandle) -> Result<f32> {
        match *self {}
    }
}

#[derive(Debug)]
pub(crate) enum GraphHandle {}

impl GraphHandle {
    pub(crate) fn begin(op: &str, _: Option<&GraphHandle>) -> Result<Self> {
        Err(not_compiled(op))
    }

    pub(crate) fn count(&self) -> (usize, usize) {
        match *self {}
    }

    pub(crate) fn kernel_names(&self) -> Result<Vec<(String, usize)>> {
        match *self {}
    }

    pub(crate) fn end(&mut self, _: &str) -> Result<()> {
        match *self {}
    }

    pub(crate) fn replay(&self, _: &str) -> Result<()> {
        match *self {}
    }

    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    pub(crate) fn is_left(&self) -> bool {
        match *self {}
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum LibraryHandle {}

impl LibraryHandle {
    /// # Safety
    /// As in `ffi::kernel`; nothing is loaded here.
    pub(crate) unsafe fn load(op: &str, _: &[u8]) -> Result<Self> {
        Err(not_compiled(op))
    }

    pub(crate) fn kernel(self, _: &str, _: &CStr) -> Result<Option<KernelHandle>> {
        match self {}
    }

    pub(crate) fn names(self) -> Option<String> {
        match self {}
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum KernelHandle {}

impl KernelHandle {
    pub(crate) fn prepare(self, _: i32) -> std::result::Result<LaunchFacts, (String, i32)> {
        match self {}
    }

    /// # Safety
    /// As in `ffi::kernel`; nothing is launched here.
    pub(crate) unsafe fn launch(
        self,
        _: &str,
        _: i32,
        _: &LaunchGrid,
        _: &mut [*const c_void],
        _: *mut c_void,
    ) -> Result<()> {
        match self {}
    }
}

/// Drop implementations, so that clippy treats `drop(guard)` in the same way as in a build with
/// CUDA.
macro_rules! impl_drop {
    ($($handle:ty),*) => {
        $(impl Drop for $handle {
            fn drop(&mut self) {
                match *self {}
            }
        })*
    };
}

impl_drop!(DeviceGuardHandle, StreamGuardHandle, EventHandle, GraphHandle);
