//! The compilers and how they are called. One set of rules serves build scripts and programs that
//! compile while they run (`tch_extension::jit`).
//!
//! 1. [`Libtorch::at`] takes the folder of libtorch's libraries. A program passes the folder of
//!    the libtorch that it has loaded.
//! 2. [`Toolchain::find`] finds the C++ compiler (`CXX`, `CXXFLAGS`, as the cc crate reads them)
//!    and, if asked, nvcc and the architectures. [`Toolchain::identity`] describes them in one
//!    text, which can be part of a cache's key.
//! 3. [`Toolchain::compile`] makes an object of each source, several at a time and only of those
//!    that changed, or takes it from the user's cache ([`Reuse`]);
//!    [`Object::dependencies`] lists the files that went into one.
//! 4. [`Toolchain::link_shared`] links the objects into a shared library, which is written
//!    completely or not at all.
//!
//! Two processes must not use one folder of objects at the same time. They may share a cache.
//!
//! ```no_run
//! use tch_extension_build::environment::Process;
//! use tch_extension_build::toolchain::{CudaMode, Libtorch, Options, Toolchain};
//!
//! # fn main() -> anyhow::Result<()> {
//! let libtorch = Libtorch::at("/path/of/libtorch/lib", &Process)?;
//! let toolchain = Toolchain::find(libtorch, CudaMode::Required, None, &Process)?;
//! let options = Options { export_symbols: true, ..Options::default() };
//! let folder = std::path::Path::new("build");
//! let sources = ["my_op.cpp".into(), "my_op.cu".into()];
//! let objects = toolchain.compile(&sources, &options, folder, 2, &Process)?;
//! toolchain.link_shared(&objects, &[], &folder.join("my_op.so"), &Process)?;
//! # Ok(())
//! # }
//! ```

use crate::arch::{self, Arch, Choice};
use crate::command::Unit;
pub use crate::compile::Object;
use crate::compile::{self, Job};
pub use crate::cxx::Cxx;
use crate::environment::Environment;
use crate::fewer;
use crate::isa;
pub use crate::libtorch::Libtorch;
use crate::objects::Objects;
use crate::paths;
use crate::probe::{self, Nvcc};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// The variables that name programs and folders.
const VARIABLES: &[&str] = &[
    "CXX",
    "CXXFLAGS",
    "NVCC",
    "NVCC_CCBIN",
    "CUDA_HOME",
    "CUDA_PATH",
    "LIBTORCH_INCLUDE",
    "TCH_EXTENSION_KERNELS",
    "OUT_DIR",
];

/// Whether to compile CUDA sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CudaMode {
    /// CUDA is compiled if libtorch has it and there is an nvcc; `TCH_EXTENSION_CUDA` overrules
    /// this.
    IfPresent,
    /// It is an error if CUDA cannot be compiled.
    Required,
    /// CUDA is left out, and nvcc is not even looked for.
    Off,
}

/// nvcc and the architectures that it compiles for.
#[derive(Clone, Debug)]
pub struct Cuda {
    /// The compiler.
    pub nvcc: Nvcc,
    /// The architectures to compile for.
    pub archs: Vec<Arch>,
}

/// A libtorch and the compilers that go with it.
#[derive(Clone, Debug)]
pub struct Toolchain {
    /// The libtorch that sources are compiled against.
    pub libtorch: Libtorch,
    /// The C++ compiler.
    pub cxx: Cxx,
    /// nvcc; `None` if CUDA is left out or its kernels are there already.
    pub cuda: Option<Cuda>,
    /// The folder of CUDA's headers, if they are not those of an nvcc.
    pub(crate) cuda_headers: Option<PathBuf>,
    /// A macro that is defined for C++ alone.
    pub(crate) define_for_cxx: Option<&'static str>,
    /// The only CPU instruction set that kernels are compiled for; all if `None`.
    pub(crate) only_isa: Option<&'static str>,
}

/// How sources are compiled.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folders that `#include` searches first, in this order, before libtorch's own.
    pub includes: Vec<PathBuf>,
    /// More folders that `#include` searches, each only for the sources whose paths begin with the
    /// path next to it. They come before `includes`.
    pub includes_for: Vec<(PathBuf, PathBuf)>,
    /// Macros with their values.
    pub defines: Vec<(String, Option<String>)>,
    /// Flags for the C++ compiler, after all others.
    pub cxx_flags: Vec<String>,
    /// Flags for nvcc, after all others.
    pub nvcc_flags: Vec<String>,
    /// Ends of the paths of CUDA sources that are also compiled for `9.0a` if the list contains
    /// 9.0, as those are that have the word `hopper` in their names.
    pub for_hopper: Vec<PathBuf>,
    /// The standard for both compilers, such as `c++17`.
    pub standard: String,
    /// Whether the compilers' warnings are requested (`-Wall -Wextra`) or suppressed.
    pub warnings: bool,
    /// Whether functions and classes are visible outside the library by default. A shared library
    /// needs this; a static library should hide them.
    pub export_symbols: bool,
    /// Whether a source is first compiled without the larger part of `torch/extension.h`, and with
    /// it only if that fails. For most sources this takes a third of the time. It needs the public
    /// headers of tch-extension among the `includes`.
    pub fewer_headers: bool,
    /// What [`Toolchain::precompile`] made, for the first attempt at sources that
    /// [`takes_precompiled`] accepts. The compiler reads the headers themselves if it does not fit.
    /// [`Object::dependencies`] leaves out what went into it.
    pub precompiled: Option<PathBuf>,
    /// Where compiled objects are looked up and kept.
    pub reuse: Reuse,
}

/// The text of the header that [`Toolchain::precompile`] compiles.
pub const PRECOMPILED: &str = "#include <torch/extension.h>\n";

/// Whether a source can be compiled with the headers of [`Toolchain::precompile`]: it is C++ for no
/// instruction set in particular, its first directive includes `torch/extension.h`, so that no macro
/// comes before, and it needs nothing from the headers that are left out.
pub fn takes_precompiled(source: &Path) -> bool {
    let takes = |text: String| !is_cpu_kernel(&text) && fewer::takes_precompiled(&text);
    !is_cuda(source) && text_of(source).is_ok_and(takes)
}

/// Where compiled objects are looked up and kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Reuse {
    /// Nowhere: the folder of objects is new and is removed afterwards.
    Never,
    /// In the folder of objects, for the next call with it.
    #[default]
    Folder,
    /// There, and in the user's cache in this folder, which several builds may use at a time.
    Cache(PathBuf),
}

impl Default for Options {
    fn default() -> Self {
        Options {
            includes: Vec::new(),
            includes_for: Vec::new(),
            defines: Vec::new(),
            cxx_flags: Vec::new(),
            nvcc_flags: Vec::new(),
            for_hopper: Vec::new(),
            standard: "c++17".to_string(),
            warnings: true,
            export_symbols: false,
            fewer_headers: false,
            precompiled: None,
            reuse: Reuse::default(),
        }
    }
}

impl Toolchain {
    /// Finds the compilers. `archs` is a list in the grammar of `TORCH_CUDA_ARCH_LIST` and
    /// overrules that variable.
    pub fn find(
        libtorch: Libtorch,
        mode: CudaMode,
        archs: Option<&str>,
        env: &dyn Environment,
    ) -> Result<Self> {
        paths::check_variables(VARIABLES)?;
        let cuda = match choose_nvcc(&libtorch, mode, env)? {
            Some(nvcc) => {
                let archs = choose_archs(archs, &nvcc, env)?;
                Some(Cuda { nvcc, archs })
            }
            None => None,
        };
        let cxx = Cxx::find(&libtorch.cxx11_abi, env)?;
        if cxx.is_clang {
            env.warns("clang has another OpenMP than libtorch: at::parallel_for runs on one thread; CXX=g++ avoids that");
        }
        Ok(Toolchain {
            libtorch,
            cxx,
            cuda,
            cuda_headers: None,
            define_for_cxx: None,
            only_isa: None,
        })
    }

    /// The folder of CUDA's headers, if C++ is compiled with CUDA.
    pub(crate) fn cuda_headers(&self) -> Option<PathBuf> {
        let of_nvcc = || Some(self.cuda.as_ref()?.nvcc.home().join("include"));
        self.cuda_headers.clone().or_else(of_nvcc)
    }

    /// Everything on which a library depends apart from the sources, their headers and the
    /// [`Options`]: the compilers with their versions and flags, the architectures, and libtorch's
    /// version and folder. libtorch's headers number thousands and are not among
    /// [`Object::dependencies`].
    pub fn identity(&self) -> String {
        let mut text = format!("{}\n{}\n", self.libtorch.identity(), self.cxx.identity());
        if let Some(Cuda { nvcc, archs }) = &self.cuda {
            text += &format!("nvcc {} in {}", nvcc.version, nvcc.path.display());
            for arch in archs {
                text += &format!(" {}", arch.flags().join(" "));
            }
        }
        text
    }

    /// Compiles each source into an object in `folder`; a source that is named twice is compiled
    /// once, and `.cu` files are left out without CUDA. At most `workers` compilers run at a time.
    /// The first failure is returned, with the compiler's message.
    pub fn compile(
        &self,
        sources: &[PathBuf],
        options: &Options,
        folder: &Path,
        workers: usize,
        env: &dyn Environment,
    ) -> Result<Vec<Object>> {
        self.check_abi(options)?;
        let paths = sources.iter().map(|path| ("the source", path));
        let own = options.includes_for.iter().map(|(_, folder)| folder);
        let includes = options.includes.iter().chain(own).map(|path| ("the include folder", path));
        for (what, path) in paths.chain(includes) {
            paths::check(what, path)?;
        }
        paths::check("the folder of objects", folder)?;
        let mut jobs = Vec::new();
        let mut seen = BTreeSet::new();
        for source in sources {
            // A source that is named twice (by itself and by its folder) would define everything
            // twice.
            if seen.insert(source.canonicalize().unwrap_or_else(|_| source.clone())) {
                self.add_jobs(source, options, folder, env, &mut jobs)?;
            }
        }
        let cache = Objects::open(&options.reuse, env);
        let result = compile::run(&jobs, workers, &cache, env);
        cache.finish(&env.var("CARGO_PKG_NAME").unwrap_or_default());
        result?;
        Ok(jobs.into_iter().map(|job| job.object).collect())
    }

    /// Compiles the part of `torch/extension.h` that most sources need, into a file in `folder`. It
    /// serves sources with the same `includes`, `cxx_flags` and `standard`, and with more `defines`
    /// if they change nothing in the headers. Beside a file `x.gch` there must be a file `x` with the
    /// text [`PRECOMPILED`]. `None` for clang, whose precompiled headers are others.
    pub fn precompile(
        &self,
        options: &Options,
        folder: &Path,
        env: &dyn Environment,
    ) -> Result<Option<Object>> {
        if self.cxx.is_clang {
            return Ok(None);
        }
        paths::check("the folder of objects", folder)?;
        let source = folder.join("extension.h");
        std::fs::write(&source, PRECOMPILED)
            .with_context(|| format!("cannot write {}", source.display()))?;
        let unit = Unit { toolchain: self, source: &source, options, folder: folder.join("cpp") };
        let job = unit.with_cxx(None)?.of_header();
        compile::run(std::slice::from_ref(&job), 1, &Objects::open(&Reuse::Never, env), env)?;
        Ok(Some(job.object))
    }

    /// Warns that the CUDA sources are left out, and says how to change that.
    pub(crate) fn warn_of_missing_nvcc(&self, env: &dyn Environment) {
        let left_out = env.var("TCH_EXTENSION_CUDA").as_deref() == Some("0");
        let Some(major) = probe::libtorch_cuda_major(&self.libtorch.lib).filter(|_| !left_out)
        else {
            return;
        };
        env.warns(&format!(
            "this libtorch has CUDA, but there is no nvcc: building without CUDA kernels (set CUDA_HOME to a CUDA \
             {major} toolkit to have them)"
        ));
    }

    fn check_abi(&self, options: &Options) -> Result<()> {
        let abi = &self.libtorch.cxx11_abi;
        let name = "_GLIBCXX_USE_CXX11_ABI";
        let mut flags = options.cxx_flags.iter().chain(&options.nvcc_flags).cloned().chain(
            options
                .defines
                .iter()
                .map(|(name, value)| format!("{name}={}", value.as_deref().unwrap_or("1"))),
        );
        let wrong =
            flags.find(|flag| flag.contains(name) && !flag.ends_with(&format!("{name}={abi}")));
        match wrong {
            Some(flag) => {
                bail!(
                    "the flag {flag} does not go with libtorch, which was built with {name}={abi}; drop it"
                )
            }
            None => Ok(()),
        }
    }

    fn add_jobs(
        &self,
        source: &Path,
        options: &Options,
        folder: &Path,
        env: &dyn Environment,
        jobs: &mut Vec<Job>,
    ) -> Result<()> {
        let unit =
            |part: &str| Unit { toolchain: self, source, options, folder: folder.join(part) };
        if is_cuda(source) {
            if let Some(cuda) = &self.cuda {
                jobs.push(unit("cuda").with_nvcc(cuda, env)?);
            }
        } else if is_cpu_kernel(&text_of(source)?) {
            for made in isa::compilations(self.only_isa) {
                jobs.push(unit(&made.folder).with_cxx(Some((made.isa, &made.flags)))?);
            }
        } else {
            jobs.push(unit("cpp").with_cxx(None)?);
        }
        Ok(())
    }

    /// Links the objects into a shared library, with `flags` and libtorch. It is first written next
    /// to `library` and then moved there. libtorch and the CUDA runtime are found by rpath; a
    /// program that has already loaded them keeps its own.
    pub fn link_shared(
        &self,
        objects: &[Object],
        flags: &[String],
        library: &Path,
        env: &dyn Environment,
    ) -> Result<()> {
        paths::check("the library", library)?;
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let partial = library.with_extension(format!("part{}-{count}", std::process::id()));
        let result = self.link(objects, flags, &partial, env).and_then(|()| {
            std::fs::rename(&partial, library)
                .with_context(|| format!("cannot write {}", library.display()))
        });
        if result.is_err() {
            let _ = std::fs::remove_file(&partial);
        }
        result
    }

    fn link(
        &self,
        objects: &[Object],
        flags: &[String],
        output: &Path,
        env: &dyn Environment,
    ) -> Result<()> {
        let mut command = self.cxx.command();
        command.args(["-shared", "-fPIC"]).args(self.cxx.openmp()).arg("-o").arg(output);
        command.args(objects.iter().map(|object| &object.path));
        // Makes the linker report missing symbols now, by their readable names, and not when the
        // library is loaded.
        command.args(["-Wl,--no-undefined", "-Wl,--as-needed"]).args(flags);
        link_folder(&mut command, &self.libtorch.lib);
        command.args(["-lc10", "-ltorch_cpu", "-ltorch"]);
        if self.cuda_headers().is_some() {
            let runtime = self.libtorch.cuda_runtime()?;
            command.args(["-lc10_cuda", "-ltorch_cuda"]);
            link_folder(&mut command, runtime.parent().unwrap_or(&self.libtorch.lib));
            // The full file name, because wheels contain `libcudart.so.13` and no `libcudart.so`.
            command
                .arg(format!("-l:{}", runtime.file_name().unwrap_or_default().to_string_lossy()));
        }
        let name = output.with_extension("so");
        compile::run_compiler(&mut command, &format!("{} does not link", name.display()), env)
            .map(|_| ())
    }
}

fn link_folder(command: &mut Command, folder: &Path) {
    command.arg(format!("-L{}", folder.display())).arg(format!("-Wl,-rpath,{}", folder.display()));
}

/// Whether this source is compiled by nvcc.
pub fn is_cuda(source: &Path) -> bool {
    source.extension().is_some_and(|extension| extension == "cu")
}

/// Whether this C++ source is compiled for each CPU instruction set.
fn is_cpu_kernel(text: &str) -> bool {
    text.contains("TCH_EXTENSION_CPU_KERNEL")
}

pub(crate) fn text_of(source: &Path) -> Result<String> {
    let bytes =
        std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn choose_archs(archs: Option<&str>, nvcc: &Nvcc, env: &dyn Environment) -> Result<Vec<Arch>> {
    let supported = supported_archs(nvcc);
    let variable = env.var("TORCH_CUDA_ARCH_LIST").filter(|list| !list.trim().is_empty());
    let (list, from) = match (archs, variable.as_deref()) {
        (Some(archs), _) => (archs, "archs"),
        (None, Some(list)) => (list, "TORCH_CUDA_ARCH_LIST"),
        (None, None) => return arch::default_archs(&supported, &arch::visible_gpus),
    };
    Choice { list, from, supported: &supported }.parse(&arch::visible_gpus)
}

/// The architectures that this nvcc compiles for.
fn supported_archs(nvcc: &Nvcc) -> Vec<u32> {
    let output = Command::new(&nvcc.path).arg("--list-gpu-arch").output();
    let listed =
        output.map(|output| arch::parse_supported(&String::from_utf8_lossy(&output.stdout)));
    listed.ok().filter(|listed| !listed.is_empty()).unwrap_or_else(|| arch::CUDA_13_0.to_vec())
}

/// Whether `TCH_EXTENSION_CUDA` says that CUDA must be there or leaves it out.
pub(crate) fn cuda_switch(env: &dyn Environment) -> Result<Option<bool>> {
    match env.var("TCH_EXTENSION_CUDA").as_deref() {
        None => Ok(None),
        Some("1") => Ok(Some(true)),
        Some("0") => Ok(Some(false)),
        Some(other) => bail!(
            "TCH_EXTENSION_CUDA={other}: write 1 (CUDA must be there), 0 (leave it out) or unset it"
        ),
    }
}

/// The nvcc to use, or `None` to build without CUDA.
fn choose_nvcc(libtorch: &Libtorch, mode: CudaMode, env: &dyn Environment) -> Result<Option<Nvcc>> {
    if mode == CudaMode::Off {
        return Ok(None);
    }
    // What requires CUDA, for the error message.
    let wanted = match (cuda_switch(env)?, mode) {
        (None, CudaMode::Required) => Some("there is CUDA to compile"),
        (None, _) => None,
        (Some(true), _) => Some("TCH_EXTENSION_CUDA=1"),
        (Some(false), CudaMode::Required) => {
            bail!(
                "there is CUDA to compile, but TCH_EXTENSION_CUDA=0 says to leave it out; unset it"
            )
        }
        (Some(false), _) => return Ok(None),
    };
    let Some(major) = probe::libtorch_cuda_major(&libtorch.lib) else {
        if let Some(wanted) = wanted {
            bail!(
                "{wanted}, but the libtorch in {} is a CPU build; set LIBTORCH to one with CUDA",
                libtorch.lib.display()
            );
        }
        return Ok(None);
    };
    let var = |name: &str| env.var(name);
    let Some(nvcc) = probe::find_nvcc(&libtorch.lib, &var) else {
        if let Some(wanted) = wanted {
            let tried: Vec<_> = probe::nvcc_candidates(&libtorch.lib, &var)
                .into_iter()
                .map(|(source, path)| format!("{} ({source})", path.display()))
                .collect();
            bail!(
                "{wanted}, but there is no nvcc; set CUDA_HOME to a CUDA {major} toolkit. Tried: {}",
                tried.join(", ")
            );
        }
        return Ok(None);
    };
    if nvcc.version.major != major {
        bail!(
            "{} (from {}) is CUDA {}, but libtorch was built for CUDA {major}; point CUDA_HOME to a CUDA {major} \
             toolkit, or set TCH_EXTENSION_CUDA=0 to build without CUDA",
            nvcc.path.display(),
            nvcc.source,
            nvcc.version
        );
    }
    Ok(Some(nvcc))
}
