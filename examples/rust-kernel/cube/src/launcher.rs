//! The texts, compiled by `jit`: with nvcc for CUDA, and with a C++ compiler and a shim for the CPU.

use std::ffi::{c_int, c_void};
use tch::{Device, Kind, Tensor};
use tch_extension::jit::{Extension, Module};
use tch_extension::{Error, Result, cuda};

/// A kernel's CUDA text, which the build script has made.
pub(crate) struct Text {
    /// The kernel's name in the text.
    pub(crate) name: &'static str,
    /// The type of its elements, and in C++.
    pub(crate) kind: Kind,
    pub(crate) element: &'static str,
    /// How many slices it takes. It writes only the last one.
    pub(crate) slices: usize,
    pub(crate) source: &'static str,
}

// The constant `THREADS`, and a `Text` for each kernel and kind.
include!(concat!(env!("OUT_DIR"), "/texts.rs"));

const SHIM: &str = include_str!("shim.h");

/// Runs a kernel: the addresses of its slices, their lengths, the number of blocks, a stream. Returns
/// an error of CUDA's, or 0.
type Run = unsafe extern "C" fn(*const *const c_void, *const Lengths, u32, *mut c_void) -> c_int;

/// The last parameter of a kernel without scalars (`info_st` in the text): a length for each slice.
/// It is longer here than any kernel's. Scalars would come first, those of a type as an array that
/// is padded to 8 bytes.
#[repr(C, align(8))]
struct Lengths([u32; MOST_SLICES]);
const MOST_SLICES: usize = 16;

/// A kernel for one kind of devices.
pub(crate) struct Kernel {
    module: Module,
    text: &'static Text,
}

impl Kernel {
    /// Compiles a text, unless `jit`'s cache has the result.
    pub(crate) fn new(text: &'static Text, device: Device) -> Result<Kernel> {
        let extension = Extension::new(format!("cube_{}", text.name));
        let extension = match device {
            Device::Cpu => extension.cpp(cpu_source(text)),
            _ => extension.cuda(cuda_source(text)),
        };
        Ok(Kernel { module: extension.load()?, text })
    }

    /// Runs it with contiguous tensors of one length and of the kernel's kind, on one device, which
    /// is of the kind that it was compiled for.
    pub(crate) fn run(&self, tensors: &[&Tensor]) -> Result<()> {
        let refuse = |what: &str| Err(Error::msg(format!("{}: {what}", self.text.name)));
        let Some(first) = tensors.first().filter(|_| tensors.len() == self.text.slices) else {
            return refuse("it takes another number of slices");
        };
        let (device, n) = (first.device(), first.numel());
        let fits = |tensor: &&Tensor| {
            tensor.kind() == self.text.kind
                && tensor.device() == device
                && tensor.numel() == n
                && tensor.is_contiguous()
        };
        if !tensors.iter().all(fits) {
            return refuse("these tensors are not slices of one length, kind and device");
        }
        let Ok(length) = u32::try_from(n) else {
            return refuse("a slice has at most 2^32 - 1 elements");
        };
        if length == 0 {
            return Ok(()); // CUDA has no empty grid
        }
        let addresses: Vec<*const c_void> =
            tensors.iter().map(|tensor| tensor.data_ptr().cast_const()).collect();
        let mut lengths = Lengths([0; MOST_SLICES]);
        lengths.0[..tensors.len()].fill(length);
        let blocks = length.div_ceil(THREADS);
        // SAFETY: the text that was compiled has this function.
        let run = unsafe { self.module.symbol::<Run>("run") }?;
        let call = |stream| {
            // SAFETY: as many addresses as the kernel takes, each of `length` elements of its kind.
            // The kernel compares its index with the length. `run` has copied both when it returns.
            // libtorch keeps memory that was dropped for later work on the same stream.
            unsafe { run(addresses.as_ptr(), &raw const lengths, blocks, stream) }
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
            status => refuse(&format!("CUDA refused the launch with error {status}")),
        }
    }
}

/// The text and the function `run` with this body.
fn with_run(text: &Text, body: &str) -> String {
    format!(
        "{source}
static_assert(sizeof(cube_text::info_st) <= {size}, \"too many slices\");
extern \"C\" int run(void** slices, const cube_text::info_st* info, unsigned blocks, void* stream) {{
{body}
}}
",
        source = text.source,
        size = size_of::<Lengths>(),
    )
}

/// The kernel's arguments in `run`.
fn arguments(text: &Text) -> String {
    let constant = |slice| if slice + 1 < text.slices { "const " } else { "" };
    let slice = |slice| format!("({}{}*)slices[{slice}], ", constant(slice), text.element);
    (0..text.slices).map(slice).chain(["*info".to_string()]).collect()
}

fn cuda_source(text: &Text) -> String {
    let (name, arguments) = (text.name, arguments(text));
    let body = format!(
        "  cube_text::{name}<<<blocks, {THREADS}, 0, (cudaStream_t)stream>>>({arguments});
  return cudaGetLastError();"
    );
    with_run(text, &body)
}

fn cpu_source(text: &Text) -> String {
    let (name, arguments) = (text.name, arguments(text));
    let body = format!(
        "  (void)stream;
  gridDim = {{blocks, 1, 1}};
  for (unsigned block = 0; block < blocks; ++block) {{
    for (unsigned thread = 0; thread < {THREADS}; ++thread) {{
      blockIdx = {{block, 0, 0}};
      threadIdx = {{thread, 0, 0}};
      cube_text::{name}({arguments});
    }}
  }}
  return 0;"
    );
    format!("{SHIM}{}", with_run(text, &body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::path::PathBuf;
    use std::process::Command;

    const TEXTS: [&Text; 4] = [&FORWARD_F32, &FORWARD_F64, &BACKWARD_F32, &BACKWARD_F64];

    #[test]
    fn the_texts_are_cuda() {
        for text in TEXTS {
            let source = text.source;
            assert!(source.contains("extern \"C\" __global__"), "{source}");
            assert!(source.contains(&format!(" {}(", text.name)), "{source}");
            assert!(source.contains("namespace cube_text {"), "{source}");
        }
    }

    #[test]
    fn what_are_no_slices_of_the_kernel_is_refused() {
        let kernel = Kernel::new(&FORWARD_F32, Device::Cpu).expect("a kernel");
        let ones = |n: i64, kind| Tensor::ones([n], (kind, Device::Cpu));
        let (x, y) = (ones(6, Kind::Float), ones(6, Kind::Float));
        let refused = |tensors: &[&Tensor]| assert!(kernel.run(tensors).is_err(), "{tensors:?}");
        refused(&[]);
        refused(&[&x]);
        refused(&[&x, &x, &y]);
        refused(&[&x, &ones(5, Kind::Float)]);
        refused(&[&x, &ones(6, Kind::Double)]);
        refused(&[&x.view([2, 3]).transpose(0, 1), &y]);
        kernel.run(&[&x, &y]).expect("it runs");
        assert_ne!(x, y);
    }

    /// The last block has threads without an element.
    #[test]
    fn nothing_beyond_the_slice_is_written() {
        let kernel = Kernel::new(&FORWARD_F64, Device::Cpu).expect("a kernel");
        let ones = || Tensor::ones([1000], (Kind::Double, Device::Cpu));
        for n in [0, 1, 255, 256, 257] {
            let (x, memory) = (ones(), ones());
            kernel.run(&[&x.narrow(0, 0, n), &memory.narrow(0, 0, n)]).expect("it runs");
            let written = i64::try_from(memory.ne(1.0).sum(Kind::Int64)).expect("a number");
            assert_eq!((written, x == ones()), (n, true));
        }
    }

    /// nvcc accepts the texts. No GPU is needed.
    #[test]
    fn nvcc_compiles_the_texts() {
        // Where `cargo xtask setup` has installed it, or your own.
        let home = std::env::var_os("CUDA_HOME").map(PathBuf::from);
        let Some(nvcc) = home.map(|home| home.join("bin/nvcc")).filter(|nvcc| nvcc.exists()) else {
            let _ = std::io::stderr().write_all(b"SKIPPED nvcc_compiles_the_texts: no nvcc\n");
            return;
        };
        let folder = std::env::temp_dir().join(format!("cube-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        for (index, text) in TEXTS.into_iter().enumerate() {
            let (source, cubin) =
                (folder.join(format!("{index}.cu")), folder.join(format!("{index}.cubin")));
            std::fs::write(&source, cuda_source(text)).expect("written");
            let output = Command::new(&nvcc)
                .args(["-cubin", "-arch=sm_90", "-std=c++17", "-Werror", "all-warnings", "-o"])
                .args([&cubin, &source])
                .output()
                .expect("nvcc");
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}\n{}", cuda_source(text));
            let image = std::fs::read(&cubin).expect("a cubin");
            let name = text.name.as_bytes();
            assert!(image.windows(name.len()).any(|part| part == name), "{}", text.name);
        }
        let _ = std::fs::remove_dir_all(&folder);
    }
}
