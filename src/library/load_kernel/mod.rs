//! Kernels in folders as Hugging Face's Kernel Hub has them.

mod metadata;
mod variants;

use super::tvm_ffi::runtime::SUPPORTED;
use super::tvm_ffi::{Function, Module};
use super::{Library, Operator, libtorch_version, operators};
use crate::{Error, cuda};
use metadata::Metadata;
use std::path::{Path, PathBuf};
use tch::Device;
use variants::{Framework, Process, Version};

/// A kernel that [`load_kernel`] has loaded. It stays loaded until the process ends.
#[derive(Clone, Debug)]
pub struct LoadedKernel {
    id: String,
    version: u64,
    variant: String,
    opened: Opened,
}

#[derive(Clone, Debug)]
enum Opened {
    Torch(Library),
    TvmFfi(Module),
}

impl LoadedKernel {
    /// Finds one of the operators of a variant for libtorch: `rms_norm` means
    /// `torch.ops.<id>.rms_norm`.
    ///
    /// # Errors
    /// As for [`Operator::find`]; and when the variant is for tvm-ffi.
    pub fn operator(&self, name: &str) -> crate::Result<Operator> {
        match self.opened {
            Opened::Torch(_) => Operator::find(&format!("{}::{name}", self.id)),
            Opened::TvmFfi(_) => Err(self.lacks("operator", name, "functions of TVM FFI")),
        }
    }

    /// The names that [`operator`](LoadedKernel::operator) takes, sorted. A variant for tvm-ffi has
    /// none.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn operators(&self) -> crate::Result<Vec<String>> {
        let names = operators(&self.id)?;
        Ok(names.iter().filter_map(|name| Some(name.split_once("::")?.1.to_string())).collect())
    }

    /// Finds one of the functions of a variant for tvm-ffi.
    ///
    /// # Errors
    /// As for [`Module::function`]; and when the variant is for libtorch.
    pub fn function(&self, name: &str) -> crate::Result<Function> {
        match &self.opened {
            Opened::TvmFfi(module) => module.function(name),
            Opened::Torch(_) => Err(self.lacks("function", name, "operators of libtorch")),
        }
    }

    /// The names that [`function`](LoadedKernel::function) takes, sorted. A variant for libtorch has
    /// none.
    pub fn functions(&self) -> &[String] {
        match &self.opened {
            Opened::TvmFfi(module) => module.functions(),
            Opened::Torch(_) => &[],
        }
    }

    fn lacks(&self, kind: &str, name: &str, has: &str) -> Error {
        let LoadedKernel { id, variant, .. } = self;
        Error::msg(format!("the kernel {id} has no {kind} {name}; its variant {variant} has {has}"))
    }

    /// The identifier of this version of the kernel for its backend, which is the namespace of its
    /// operators, too.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The version. It increases when what the kernel offers changes.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The build variant that was loaded, such as `torch211-cxx11-cu130-x86_64-linux`.
    pub fn variant(&self) -> &str {
        &self.variant
    }

    /// The path of the library, absolute and with links resolved.
    pub fn path(&self) -> &Path {
        match &self.opened {
            Opened::Torch(library) => library.path(),
            Opened::TvmFfi(module) => module.path(),
        }
    }
}

/// Loads a kernel from a folder as the [Kernel Hub] has it, without Python. Hugging Face's
/// `kernel-builder` writes such folders: a kernel in several *build variants*, for versions of
/// libtorch and of CUDA, for the CPU and for other GPUs. Nothing is fetched;
/// `hf download --repo-type kernel` does that.
///
/// ```no_run
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::{args, library::load_kernel};
///
/// let kernel = load_kernel("activation")?;
/// let x = Tensor::randn([8, 256], (Kind::Half, Device::Cuda(0)));
/// let y = Tensor::empty([8, 128], (Kind::Half, Device::Cuda(0)));
/// kernel.operator("silu_and_mul")?.call::<()>(args![&y, &x])?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// `path` is the folder of a repository, with `build` in it; or the folder `build`; or the folder of
/// one variant; or a snapshot in the cache of `huggingface_hub`, whose files are symbolic links.
///
/// The variants that fit are chosen by their names, as the Python package `kernels` does:
///
/// | folder | fits |
/// |---|---|
/// | `torch-stable-abi211-cu130-x86_64-linux` | libtorch 2.11 or newer |
/// | `torch211-cxx11-cu130-x86_64-linux`, with or without `cxx11` | libtorch 2.11 |
/// | `tvm-ffi01-cu130-x86_64-linux` | libtvm_ffi 0.1 |
/// | with `cu130` | a build of this crate with CUDA 13.0 or a newer 13 |
/// | with `cpu` | a build of this crate without CUDA; with CUDA, see [`load_kernel_for`] |
///
/// Of the first three rows, an earlier one is preferred, and then a newer stable ABI and a newer CUDA.
/// Variants for Python only (`torch-cuda`, `torch-universal`), for other systems, and for `rocm`,
/// `xpu`, `metal` and others do not fit. If `path` is one variant, it must fit, too, but may be for the
/// CPU in any case.
///
/// From `metadata.json` come the id, the version, the GPUs that the kernel was compiled for, and
/// digests of the files. If there is a GPU, it must be one of those. If there are digests, they are
/// compared with the files. Then [`Library::load`] loads `<id>.abi3.so`, which usually is a Python
/// module, too, and so needs a `libpython`; or [`Module::load`] loads the `<id>.so` of a variant for
/// tvm-ffi. If any of this fails, the next variant is tried. What the kernel's Python files do in
/// addition, such as allocating the output and checking arguments, is up to you.
///
/// # Security
/// A kernel that is loaded can do whatever the program can. The digests prove integrity: the files are
/// complete and those that `metadata.json` names. They do not prove origin, because whoever changes a
/// file can change `metadata.json`, too (its signature, `metadata.json.sigstore`, is not verified;
/// `kernels verify-signature` does that). A file is compared first and then loaded by its name, so a
/// change in between is not noticed: let nobody else write to the folder.
///
/// # Errors
/// When no variant can be loaded. The message says for each one why: it does not fit; `metadata.json`
/// is missing, damaged or larger than 1 MiB; it was not compiled for the GPU; a file has another
/// digest, or is outside of the folder; or [`Library::load`] or [`Module::load`] fails.
///
/// [Kernel Hub]: https://huggingface.co/docs/kernels
pub fn load_kernel(path: impl AsRef<Path>) -> crate::Result<LoadedKernel> {
    load(path.as_ref(), None)
}

/// Like [`load_kernel`], for a device: the CPU although this crate has CUDA, or another GPU than the
/// first, whose architecture is then compared with those of the kernel.
///
/// ```no_run
/// let kernel = tch_extension::library::load_kernel_for("activation", tch::Device::Cpu)?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`load_kernel`]; and when `device` is neither the CPU nor an existing CUDA device.
pub fn load_kernel_for(path: impl AsRef<Path>, device: Device) -> crate::Result<LoadedKernel> {
    load(path.as_ref(), Some(device))
}

fn load(path: &Path, device: Option<Device>) -> crate::Result<LoadedKernel> {
    try_load(path, device).map_err(|reason| {
        let text = format!("cannot load a kernel from {}: {reason}", path.display());
        Error::msg(text.replace('\n', " "))
    })
}

fn try_load(path: &Path, mut device: Option<Device>) -> Result<LoadedKernel, String> {
    let mut groups = vec![(path.to_path_buf(), names(path)?)];
    let build = path.join("build");
    if build.is_dir() {
        groups.push((build.clone(), names(&build)?));
    }
    if groups.iter().all(|(_, names)| names.is_empty()) {
        let (folder, name) = as_variant(path).ok_or(NOTHING)?;
        if device.is_none() && name.contains("-cpu-") {
            device = Some(Device::Cpu);
        }
        groups = vec![(folder, vec![name])];
    }
    let (process, gpu) = process(device)?;
    let (mut reasons, mut unfit) = (Vec::new(), Vec::new());
    for (folder, names) in groups {
        let (fitting, others) = variants::choose(&names, &process);
        for (name, framework) in fitting {
            match open(&folder, &name, framework, &process, gpu) {
                Ok(kernel) => return Ok(kernel),
                Err(reason) => reasons.push((name, reason)),
            }
        }
        unfit.extend(others);
    }
    reasons.extend(unfit);
    let reasons = reasons.iter().map(|(name, reason)| format!("{name}: {reason}"));
    Err(reasons.collect::<Vec<_>>().join("; "))
}

const NOTHING: &str = "it contains no variants such as torch211-cxx11-cu130-x86_64-linux, nor a \
                       folder build that does, and is no such variant";

/// The names of the variants in a folder, sorted.
fn names(folder: &Path) -> Result<Vec<String>, String> {
    let entries = folder.read_dir().map_err(|error| error.to_string())?.flatten();
    let folders = entries.filter(|entry| entry.path().is_dir());
    let names = folders.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| variants::is_variant(name)).collect();
    names.sort_unstable();
    Ok(names)
}

/// The parent and the name of a folder that is a variant itself.
fn as_variant(path: &Path) -> Option<(PathBuf, String)> {
    let path = std::path::absolute(path).ok()?;
    let name = path.file_name()?.to_str()?;
    let is_variant = variants::is_variant(name) || path.join(metadata::FILE).exists();
    is_variant.then(|| Some((path.parent()?.to_path_buf(), name.to_string())))?
}

/// What decides which variants fit, and the compute capability of the GPU, if there is one.
fn process(device: Option<Device>) -> Result<(Process, Option<Version>), String> {
    let words = |error: Error| error.to_string();
    let gpu = match device {
        Some(Device::Cpu) => None,
        None if cuda::device_count() == 0 => None,
        _ => {
            let gpu = cuda::device_properties(device.unwrap_or(Device::Cuda(0))).map_err(words)?;
            Some((gpu.major.unsigned_abs(), gpu.minor.unsigned_abs()))
        }
    };
    let has_cuda = cuda::is_compiled() && device != Some(Device::Cpu);
    let cuda = has_cuda.then(cuda::runtime_version).transpose().map_err(words)?;
    let numbers = libtorch_version();
    let mut numbers = numbers.split('.').map_while(|number| number.parse().ok());
    let torch = numbers.next().zip(numbers.next()).ok_or("the version of libtorch is unknown")?;
    let cuda = cuda.map(|version| (version / 1000, version % 1000 / 10));
    Ok((Process { torch, tvm_ffi: Some(SUPPORTED), cuda }, gpu))
}

/// Checks the files of a variant that fits, and loads its library.
fn open(
    folder: &Path,
    variant: &str,
    framework: Framework,
    process: &Process,
    gpu: Option<Version>,
) -> Result<LoadedKernel, String> {
    let build = folder.join(variant);
    let metadata = Metadata::read(&build, process.cuda.map_or("cpu", |_| "cuda"))?;
    if let Some(gpu) = gpu {
        metadata.check_capability(gpu)?;
    }
    let suffix = if matches!(framework, Framework::TvmFfi(_)) { "so" } else { "abi3.so" };
    let file = format!("{}.{suffix}", metadata.id());
    metadata.check_files(&build, &file)?;
    let file = build.join(file);
    let opened = match framework {
        Framework::TvmFfi(_) => Module::load(file).map(Opened::TvmFfi),
        _ => Library::load(file).map(Opened::Torch),
    };
    let opened = opened.map_err(|error| error.to_string())?;
    let (id, version) = (metadata.id().to_string(), metadata.version());
    Ok(LoadedKernel { id, version, variant: variant.to_string(), opened })
}
