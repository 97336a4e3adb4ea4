//! The text, compiled by `jit`: with nvcc for CUDA, and with a C++ compiler for the CPU, where a shim
//! runs the blocks and threads one after another. The shim is right for kernels without
//! `sync_cube`, planes and shared memory. It is there for tests, and slow.

use crate::text::{THREADS, Text};
use std::ffi::{c_int, c_void};
use tch::{Device, Tensor};
use tch_extension::jit::{Extension, Module};
use tch_extension::{Error, Result, cuda};

/// What the text expects of CUDA.
const SHIM: &str = "
#include <cmath>
#include <cstddef>
#include <cstdint>
#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __grid_constant__
#define __restrict__ __restrict
struct Index { unsigned x, y, z; };
static thread_local Index blockIdx, threadIdx, gridDim;
using std::exp;
";

/// Runs a kernel with slices: buffers, the lengths of the slices, the number of blocks, a stream.
/// Returns an error of CUDA's, or 0.
type Run = unsafe extern "C" fn(*const *const c_void, *const c_void, u32, *mut c_void) -> c_int;

/// A kernel for one kind of devices. The last of its slices is written.
pub struct Kernel {
    module: Module,
    slices: usize,
}

impl Kernel {
    /// Compiles a text whose kernel has this many slices of a C++ type.
    pub fn new(text: &Text, slices: usize, element: &str, device: Device) -> Result<Kernel> {
        let Text { source, name } = text;
        let arguments: String = (0..slices)
            .map(|slice| {
                let constant = if slice + 1 < slices { "const " } else { "" };
                format!("({constant}{element}*)buffers[{slice}], ")
            })
            .collect();
        // Its typedefs clash with the system's headers, so that the text gets a namespace, and what
        // it includes comes before.
        let (includes, body): (Vec<&str>, Vec<&str>) =
            source.lines().partition(|line| line.trim_start().starts_with("#include"));
        let (includes, body) = (includes.join("\n"), body.join("\n"));
        let run = format!(
            "extern \"C\" int run(void** buffers, const cube_text::info_st* info, unsigned blocks, void* stream)"
        );
        let extension = Extension::new(format!("cube_{name}"));
        let extension = match device {
            Device::Cpu => extension.cpp(format!(
                "{SHIM}\nnamespace cube_text {{\n{body}\n}}\n{run} {{
                    gridDim = {{blocks, 1, 1}};
                    for (unsigned block = 0; block < blocks; ++block) {{
                        for (unsigned thread = 0; thread < {THREADS}; ++thread) {{
                            blockIdx = {{block, 0, 0}};
                            threadIdx = {{thread, 0, 0}};
                            cube_text::{name}({arguments}*info);
                        }}
                    }}
                    return 0;
                }}"
            )),
            _ => extension.cuda(format!(
                "{includes}\nnamespace cube_text {{\n{body}\n}}\n{run} {{
                    cube_text::{name}<<<blocks, {THREADS}, 0, (cudaStream_t)stream>>>({arguments}*info);
                    return cudaGetLastError();
                }}"
            )),
        };
        Ok(Kernel { module: extension.load()?, slices })
    }

    /// Runs it with contiguous tensors of one length and of the kernel's kind, on the device that it
    /// was compiled for.
    pub fn run(&self, tensors: &[&Tensor]) -> Result<()> {
        let (device, n) = (tensors[0].device(), tensors[0].numel());
        let fits = |tensor: &&Tensor| {
            tensor.is_contiguous() && tensor.numel() == n && tensor.device() == device
        };
        let length = u32::try_from(n).ok().filter(|_| tensors.iter().all(fits));
        let Some(length) = length.filter(|_| tensors.len() == self.slices) else {
            return Err(Error::msg("cube: these tensors are not slices of one length"));
        };
        if length == 0 {
            return Ok(());
        }
        let buffers: Vec<*const c_void> =
            tensors.iter().map(|tensor| tensor.data_ptr().cast_const()).collect();
        // `info_st` of a kernel without scalars: a length for each slice. It is longer here than any
        // kernel's. Scalars would come first, those of a type as an array that is padded to 8 bytes.
        let mut lengths = [0u32; 16];
        lengths[..tensors.len()].fill(length);
        let blocks = length.div_ceil(THREADS);
        // SAFETY: the text that was compiled has this function.
        let run = unsafe { self.module.symbol::<Run>("run") }?;
        let call = |stream| {
            // SAFETY: as many buffers as the kernel has slices, each of `length` elements. The kernel
            // checks its index against the length.
            unsafe { run(buffers.as_ptr(), lengths.as_ptr().cast(), blocks, stream) }
        };
        let status = match device {
            Device::Cpu => call(std::ptr::null_mut()),
            device => {
                let _guard = cuda::DeviceGuard::new(device)?;
                call(cuda::Stream::current(device)?.as_ptr())
            }
        };
        match status {
            0 => Ok(()),
            status => Err(Error::msg(format!("cube: CUDA refused the launch with error {status}"))),
        }
    }
}
