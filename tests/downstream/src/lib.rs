//! A crate with kernels of its own, as a user would write it. Some of its kernels are wrong on
//! purpose, to prove that the tools that find nothing in the operators can find something.

pub mod cube;
pub mod maths;

/// The kernels of `csrc/planted.cu`, which exist only with CUDA.
#[cfg(tch_extension_cuda)]
pub mod planted {
    use std::ffi::c_void;
    use tch::Tensor;
    use tch_extension::Result;
    use tch_extension::cuda::{LaunchStatus, launch};

    unsafe extern "C" {
        fn downstream_planted_overrun(
            data: *mut c_void,
            len: i64,
            stream: *mut c_void,
        ) -> LaunchStatus;
        fn downstream_planted_race(data: *mut c_void, stream: *mut c_void) -> LaunchStatus;
        fn downstream_planted_launch(data: *mut c_void, stream: *mut c_void) -> LaunchStatus;
    }

    /// Writes one element past the end of a float tensor.
    ///
    /// # Errors
    /// If the launch fails.
    pub fn overrun(data: &Tensor) -> Result<()> {
        let len = data.numel() as i64;
        // SAFETY: this overrun is undefined behaviour on purpose. libtorch's allocator rounds sizes
        // up, so it harms nothing else.
        launch(data.device(), |stream| unsafe {
            downstream_planted_overrun(data.data_ptr(), len, stream)
        })
    }

    /// Reads and writes shared memory without a barrier. `data` must have 256 floats.
    ///
    /// # Errors
    /// If the launch fails.
    pub fn race(data: &Tensor) -> Result<()> {
        assert_eq!(data.numel(), 256);
        // SAFETY: the assertion makes sure of 256 elements, and the kernel accesses no others.
        // Which values it writes is undefined on purpose.
        launch(data.device(), |stream| unsafe { downstream_planted_race(data.data_ptr(), stream) })
    }

    /// Tries a launch that CUDA refuses.
    ///
    /// # Errors
    /// Always.
    pub fn impossible_launch(data: &Tensor) -> Result<()> {
        // SAFETY: CUDA refuses the launch, so the kernel never runs.
        launch(data.device(), |stream| unsafe {
            downstream_planted_launch(data.data_ptr(), stream)
        })
    }
}
