//! What a build script does once it has said what to compile: it finds the toolchain, compiles, and
//! prints cargo's lines.

use super::{Built, Extension};
use crate::environment::{BuildScript, Environment, Process};
use crate::kernels::{self, Exports, Form, Wanted};
use crate::toolchain::{
    CudaMode, Libtorch, Object, Options, Reuse, Toolchain, cuda_switch, is_cuda, text_of,
};
use crate::{isa, isolate, paths, place, probe};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

impl Extension {
    /// Compiles the sources, makes an archive, and tells cargo what to link. It compiles nothing on
    /// docs.rs, with a feature `doc-only` and with `TCH_EXTENSION_CHECK=1`. With the latter, cargo is
    /// told that CUDA is there unless `TCH_EXTENSION_CUDA=0` leaves it out.
    ///
    /// # Errors
    /// For a source that is missing, whose path is not UTF-8 or that does not compile, for an
    /// unknown architecture, and for a libtorch or a compiler that is missing or does not fit. The
    /// error is one message that also names the solution.
    pub fn build(&self) -> Result<Built> {
        println!("cargo::rustc-check-cfg=cfg(tch_extension_cuda)");
        let script = BuildScript::default();
        let purpose = Purpose::of(&script)?;
        if let Some(built) = purpose.without_compiling() {
            script.print();
            if built.cuda {
                println!("cargo::{CUDA_CFG}");
            }
            return Ok(built);
        }
        let (built, lines) = self.build_in(&script)?;
        script.print();
        // rustc accepts a library with modifiers only once. When several extensions of a crate need
        // it, two lines are enough: the first one, and the one of tch-extension, which the linker
        // reads after all of them.
        static ONCE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut once = ONCE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for line in lines {
            if line.starts_with("rustc-link-lib=static")
                && !once.insert(format!("lib{}.a", self.name))
            {
                bail!(
                    "two extensions of this build script are called {:?}; the second takes the first's place",
                    self.name
                );
            }
            if let Some(folders) = line.strip_prefix(KERNELS) {
                *OWN_KERNELS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) =
                    Some(folders.to_string());
            }
            if !line.contains(":+verbatim=") || once.insert(line.clone()) {
                println!("cargo::{line}");
            }
        }
        Ok(built)
    }

    /// Calls [`Extension::build`]. A failure prints one message and ends the build script.
    pub fn build_or_exit(&self) -> Built {
        self.build().unwrap_or_else(|error| exit(&error))
    }

    /// Builds, and also returns the lines that cargo must be told.
    pub(super) fn build_in(&self, env: &dyn Environment) -> Result<(Built, Vec<String>)> {
        if let Some(mistake) = &self.mistake {
            bail!("{mistake}");
        }
        if self.sources.is_empty() {
            bail!(
                "Extension::new({:?}) has no source; add some with source_dir or source",
                self.name
            );
        }
        let is_no_source = |end: &&PathBuf| {
            !self.sources.iter().any(|source| is_cuda(source) && source.ends_with(end))
        };
        if let Some(end) = self.options.for_hopper.iter().find(is_no_source) {
            bail!(
                "for_hopper({:?}): no CUDA source's path ends so; name one that was added, such as csrc/my_op.cu",
                end
            );
        }
        for folder in &self.folders {
            paths::check("the source folder", folder)?;
            env.reads(folder);
        }
        let libtorch = find_libtorch(env)?;
        let has_cuda_sources = self.sources.iter().any(|source| is_cuda(source));
        let (form, wanted) = self.wanted_kernels(&libtorch, env)?;
        let mut kernels = None;
        let mut cuda_headers = None;
        if let (Form::Prebuilt(path), Some(wanted)) = (&form, &wanted) {
            kernels = Some(wanted.prebuilt(path, &libtorch, env)?);
            cuda_headers = Some(kernels::headers(&libtorch, wanted.cuda, env)?);
        }
        let mode = if kernels.is_some() { CudaMode::Off } else { CudaMode::IfPresent };
        let mut toolchain = Toolchain::find(libtorch, mode, self.archs.as_deref(), env)?;
        toolchain.only_isa = isa::chosen(env)?;
        toolchain.cuda_headers = cuda_headers;
        if kernels.is_none() && toolchain.cuda.is_none() && has_cuda_sources {
            toolchain.warn_of_missing_nvcc(env);
        }
        let mut options = self.options_for(env);
        let has_cuda = toolchain.cuda_headers().is_some();
        if has_cuda {
            options.includes_for.extend(self.folders_of_headers(&toolchain.libtorch, env));
        }
        if env.var("PROFILE").as_deref() == Some("debug") {
            // With this macro, the headers check indices. It makes no difference to a kernel library,
            // so debug builds share its objects with all others.
            match self.kernels.is_some() || self.has_static_kernels {
                true => toolchain.define_for_cxx = Some(DEBUG),
                false => options.defines.push((DEBUG.to_string(), None)),
            }
        }
        let out_dir = env.var("OUT_DIR").context("OUT_DIR is unset: not in a build script?")?;
        let out_dir = Path::new(&out_dir);
        // The number of jobs that cargo was started with (`--jobs`).
        let workers = env.var("NUM_JOBS").and_then(|count| count.parse().ok()).unwrap_or(1);
        options.reuse = reuse(env)?;
        #[cfg(feature = "headers")]
        self.write_params(out_dir, &mut options, env)?;
        let mut objects = toolchain.compile(&self.sources, &options, out_dir, workers, env)?;
        if let Some(cuda) = &toolchain.cuda {
            // Not CUDA's headers, which are hundreds.
            env.reads(&cuda.nvcc.path);
        }

        if self.kernels.is_some() {
            // The library of an earlier build must not be taken for one of this build.
            let _ = std::fs::remove_dir_all(out_dir.join(place::KERNELS));
        }
        if let (Form::Shared, Some(wanted)) = (&form, &wanted) {
            let of_cuda: Vec<Object> =
                objects.extract_if(.., |object| is_cuda(&object.source)).collect();
            if !of_cuda.is_empty() {
                kernels = Some(wanted.link(&of_cuda, &toolchain, out_dir, &options.reuse, env)?);
            }
        }

        let mut lines = Vec::new();
        // Without CUDA, a crate that has only CUDA sources has nothing to archive.
        if !objects.is_empty() {
            let (target, host) = env.triples();
            let mut archive = cc::Build::new();
            archive.cpp(true).opt_level(3).target(&target).host(&host).out_dir(out_dir);
            archive.cargo_metadata(false).cargo_warnings(false);
            if self.is_isolated(&objects)? {
                archive.object(isolate::isolate(
                    &objects,
                    &self.name,
                    out_dir,
                    &toolchain.cxx,
                    env,
                )?);
            } else {
                archive.objects(objects.iter().map(|object| &object.path));
            }
            archive
                .try_compile(&self.name)
                .with_context(|| format!("cannot archive lib{}.a", self.name))?;
            lines.push(format!("rustc-link-search=native={}", out_dir.display()));
            let whole = if self.is_whole()? { ":+whole-archive" } else { "" };
            lines.push(format!("rustc-link-lib=static{whole}={}", self.name));
            lines.push("rustc-link-lib=stdc++".to_string());
        }
        if let Some(library) = &kernels {
            lines.push(format!("rustc-link-search=native={}", library.folder().display()));
            lines.push(format!("rustc-link-lib=dylib:+verbatim={}", library.name()));
            let folders = std::env::join_paths(&library.folders)?.to_string_lossy().into_owned();
            lines.push(format!("{KERNELS}{folders}"));
        }
        lines.extend(self.link_lines(&toolchain.libtorch, has_cuda)?);
        Ok((Built { cuda: has_cuda }, lines))
    }

    /// How the kernels of this extension are linked, and which are wanted if they are linked for
    /// themselves.
    fn wanted_kernels(
        &self,
        libtorch: &Libtorch,
        env: &dyn Environment,
    ) -> Result<(Form, Option<Wanted<'_>>)> {
        let Some(exports) = &self.kernels else { return Ok((Form::Static, None)) };
        if cuda_switch(env)? == Some(false) {
            return Ok((Form::Static, None));
        }
        let form = Form::chosen(env)?;
        if form == Form::Static {
            return Ok((form, None));
        }
        let Some(cuda) = probe::libtorch_cuda_major(&libtorch.lib) else {
            if let Form::Prebuilt(path) = form {
                bail!(
                    "{}={}, but the libtorch in {} is a CPU build; unset it",
                    kernels::VARIABLE,
                    path.display(),
                    libtorch.lib.display()
                );
            }
            return Ok((Form::Static, None));
        };
        env.reads(exports);
        let exports = Exports::read(exports)?;
        Ok((form, Some(Wanted { exports, sources: &self.sources, cuda })))
    }

    /// Writes the headers of [`Extension::params`] and lets the sources find them. A header whose
    /// text stays the same is not touched, so that nothing is compiled again.
    #[cfg(feature = "headers")]
    fn write_params(
        &self,
        folder: &Path,
        options: &mut Options,
        env: &dyn Environment,
    ) -> Result<()> {
        let include = folder.join("params");
        for source in &self.params {
            paths::check("the source of parameters", source)?;
            env.reads(source);
            let header =
                crate::headers::Header::new([source.clone()], crate::headers::prefix_of(source));
            let text = header.generate()?.with_context(|| {
                format!(
                    "params: {} has no #[repr(C)] struct and no #[repr(i32)] enum",
                    source.display()
                )
            })?;
            let path = include.join(format!("{}.h", source.display()));
            if std::fs::read_to_string(&path).is_ok_and(|before| before == text) {
                continue;
            }
            let parent = path.parent().unwrap_or(&include);
            std::fs::create_dir_all(parent)
                .and_then(|()| std::fs::write(&path, text))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        if !self.params.is_empty() {
            options.includes.push(include);
        }
        Ok(())
    }

    /// The folders of the headers of [`Extension::cuda_header`] that are found.
    fn folders_of_headers(
        &self,
        libtorch: &Libtorch,
        env: &dyn Environment,
    ) -> Vec<(PathBuf, PathBuf)> {
        let found = self.cuda_headers.iter().filter_map(|(path, header)| {
            let folder = probe::cuda_header(&libtorch.lib, header, &|name| env.var(name))?;
            env.reads(&folder.join(header));
            let is_system = probe::SYSTEM_INCLUDES.iter().any(|system| folder == Path::new(system));
            (!is_system).then(|| (path.clone(), folder))
        });
        found.collect()
    }

    fn options_for(&self, env: &dyn Environment) -> Options {
        let Some(public) = env.var("DEP_TCH_EXTENSION_INCLUDE").map(PathBuf::from) else {
            return Options { includes: self.includes.clone(), ..self.options.clone() };
        };
        // The headers that replace Python's must be found before Python's own. The crate's own
        // folders come before the public headers of tch-extension.
        let python = public.join("tch_extension/python");
        let includes =
            std::iter::once(python).chain(self.includes.iter().cloned()).chain([public]).collect();
        let mut options = Options { includes, fewer_headers: true, ..self.options.clone() };
        let name = "TORCH_EXTENSION_NAME";
        if options.defines.iter().all(|(defined, _)| defined != name) {
            options.defines.push((name.to_string(), Some(self.name.replace('-', "_"))));
        }
        options
    }

    fn is_whole(&self) -> Result<bool> {
        self.whole_archive.map_or_else(|| self.mention(&["TORCH_LIBRARY", "PYBIND11_MODULE"]), Ok)
    }

    fn is_isolated(&self, objects: &[Object]) -> Result<bool> {
        match self.isolated {
            Some(isolated) => Ok(isolated),
            None if self.mention(&["PYBIND11_MODULE", "PyInit_", "PyMODINIT_FUNC"])? => {
                isolate::is_module(objects)
            }
            None => Ok(false),
        }
    }

    /// Whether one of the sources contains one of these words.
    fn mention(&self, words: &[&str]) -> Result<bool> {
        for source in &self.sources {
            let text = text_of(source)?;
            if words.iter().any(|word| text.contains(word)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The lines that link libtorch, and the metadata that dependents' build scripts ask for.
    fn link_lines(&self, libtorch: &Libtorch, cuda: bool) -> Result<Vec<String>> {
        let mut lines = vec![
            format!("rustc-link-search=native={}", libtorch.lib.display()),
            format!("metadata=libtorch_lib={}", libtorch.lib.display()),
        ];
        if let Some(include) = self.includes.first() {
            let include = include.canonicalize().unwrap_or_else(|_| include.clone());
            lines.push(format!("metadata=include={}", include.display()));
        }
        if cuda {
            for library in
                std::iter::once("cudart").chain(self.cuda_libraries.iter().map(String::as_str))
            {
                let library = libtorch.cuda_library(library)?;
                let folder = library.parent().unwrap_or(&libtorch.lib);
                let name = library.file_name().unwrap_or_default().to_string_lossy();
                lines.push(format!("rustc-link-search=native={}", folder.display()));
                // The full file name, because wheels contain `libcudart.so.13` and no
                // `libcudart.so`.
                lines.push(format!("rustc-link-lib=dylib:+verbatim={name}"));
            }
            lines.push("rustc-link-lib=dylib=c10_cuda".to_string());
            lines.push(CUDA_CFG.to_string());
        }
        Ok(lines)
    }
}

/// Lets this package's programs, tests, benches and examples find libtorch without
/// `LD_LIBRARY_PATH`. Cargo does not pass such flags on to dependents, so the build script of each
/// package that makes a final program calls this once.
pub fn link_args() {
    print_search_paths(&["rustc-link-arg"]);
}

/// Links a library that Python loads with `torch.ops.load_library`: a `cdylib` that registers
/// operators. The build script calls this in place of [`link_args`].
///
/// The library names no folder of this machine: it finds the libtorch that `import torch` has
/// loaded. It is never unloaded, because libtorch keeps pointers to its kernels. It has no symbol
/// table; cargo shows none of the C++ that is linked in.
///
/// With `TCH_EXTENSION_KERNELS`, it looks for the kernel library next to itself, and then where the
/// build left it: in the target folder, or at the path that was given, which it names. Ship it with
/// the kernel library next to it, or build it with static kernels.
///
/// The package's programs, and its tests in the folder `tests`, find libtorch as after
/// [`link_args`], if they are there when the build script runs: `touch build.rs` after adding the
/// first one. Tests inside the library need `LD_LIBRARY_PATH`; `test = false` in `[lib]` says that
/// there are none.
pub fn python_link_args() {
    let folder = Process.var("CARGO_MANIFEST_DIR").unwrap_or_default();
    // Cargo refuses an argument for a kind of target that the package lacks.
    let kinds = [
        ("bins", "src/main.rs"),
        ("bins", "src/bin"),
        ("tests", "tests"),
        ("benches", "benches"),
        ("examples", "examples"),
    ];
    let present = kinds.iter().filter(|(_, place)| has_rust(&Path::new(&folder).join(place)));
    let mut keys: Vec<String> = present.map(|(kind, _)| format!("rustc-link-arg-{kind}")).collect();
    keys.dedup();
    print_search_paths(&keys);
    let out_dir = Process.var("OUT_DIR").unwrap_or_default();
    let folders = from_library(&kernel_folders(&Process), Path::new(&out_dir));
    let arguments = ["-Wl,-z,nodelete", "-Wl,--strip-all"];
    for argument in arguments.into_iter().chain(folders.iter().flat_map(|folder| rpath(folder))) {
        println!("cargo::rustc-link-arg-cdylib={argument}");
    }
}

/// Where a library in the target folder looks for the kernel library: next to itself, and where it is
/// now. If that is in the target folder, too, as in `target/debug/build/tch-extension-0123/out/kernels`,
/// no folder of this machine is named. The library is `target/debug/libmy_ops.so`, and tests load it
/// from `target/debug/deps`.
pub(super) fn from_library(kernels: &[PathBuf], out_dir: &Path) -> Vec<String> {
    let target = out_dir.ancestors().nth(3).unwrap_or(out_dir);
    let inside = kernels.iter().filter_map(|folder| folder.strip_prefix(target).ok());
    let of_both = |folder: &Path| ["", "../"].map(|up| format!("$ORIGIN/{up}{}", folder.display()));
    let mut folders: Vec<String> = inside.flat_map(of_both).collect();
    if folders.is_empty() {
        folders = kernels.iter().map(|folder| folder.display().to_string()).collect();
    }
    if !folders.is_empty() {
        folders.insert(0, "$ORIGIN".to_string());
    }
    folders
}

/// The arguments that name a folder in which a program looks for libraries. `-Wl` would split it at its
/// commas.
fn rpath(folder: &str) -> [&str; 4] {
    ["-Xlinker", "-rpath", "-Xlinker", folder]
}

/// Whether this is a file, or a folder with sources of Rust, in which cargo finds a target.
fn has_rust(place: &Path) -> bool {
    let is_rust = |path: &Path| {
        path.extension().is_some_and(|end| end == "rs") || path.join("main.rs").exists()
    };
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    place.is_file() || entries.into_iter().any(|entry| is_rust(&entry.path()))
}

/// Prints where libtorch and CUDA are, once for each key of cargo's.
fn print_search_paths(keys: &[impl std::fmt::Display]) {
    let script = BuildScript::default();
    let purpose = Purpose::of(&script).unwrap_or_else(|error| exit(&error));
    if purpose != Purpose::Link {
        script.print();
        return;
    }
    let libtorch = find_libtorch(&script).unwrap_or_else(|error| exit(&error));
    script.print();
    let runtime = libtorch.cuda_runtime().ok();
    let folders = [Some(libtorch.lib.as_path()), runtime.as_deref().and_then(Path::parent)];
    let folders = folders.into_iter().flatten().map(Path::to_path_buf);
    for folder in folders.chain(kernel_folders(&script)) {
        for key in keys {
            for argument in rpath(&folder.display().to_string()) {
                println!("cargo::{key}={argument}");
            }
        }
    }
}

/// The metadata with the folders of the kernel library, for dependents' build scripts.
const KERNELS: &str = "metadata=kernels=";

/// The folders of the kernel library that this build script has linked.
static OWN_KERNELS: Mutex<Option<String>> = Mutex::new(None);

/// The folders of the kernel library, if there is one.
fn kernel_folders(env: &dyn Environment) -> Vec<PathBuf> {
    let own = OWN_KERNELS.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    let folders = own.or_else(|| env.var("DEP_TCH_EXTENSION_KERNELS")).unwrap_or_default();
    std::env::split_paths(&folders).filter(|folder| folder.is_absolute()).collect()
}

/// The user's cache, unless it is switched off.
fn reuse(env: &dyn Environment) -> Result<Reuse> {
    match env.var(place::SWITCH).as_deref() {
        None | Some("1") => {}
        Some("0") => return Ok(Reuse::Folder),
        Some(other) => {
            bail!(
                "{}={other}: write 0 (compile without the cache) or unset it; TCH_EXTENSION_CACHE names the cache's folder",
                place::SWITCH
            )
        }
    }
    let chosen = env.var("TCH_EXTENSION_CACHE").map(PathBuf::from);
    Ok(match place::folder(chosen.as_deref()) {
        Ok(folder) => Reuse::Cache(folder),
        Err(error) => {
            env.warns(&format!("there is no compile cache, so more is compiled: {error}"));
            Reuse::Folder
        }
    })
}

fn exit(error: &anyhow::Error) -> ! {
    eprintln!("error: {error:#}");
    std::process::exit(1)
}

/// The libtorch that torch-sys links. Cargo tells its folder to direct dependents of torch-sys;
/// this crate's own `links` key passes it on to those of tch-extension.
fn find_libtorch(env: &dyn Environment) -> Result<Libtorch> {
    if env.var("CARGO_CFG_TARGET_OS").as_deref() != Some("linux")
        || env.var("CARGO_CFG_TARGET_ARCH").as_deref() != Some("x86_64")
    {
        bail!("tch-extension supports Linux on x86-64 only");
    }
    let lib = env.var("DEP_TCH_LIBTORCH_LIB").or_else(|| env.var("DEP_TCH_EXTENSION_LIBTORCH_LIB"));
    let lib = lib.context(
        "cargo did not say where libtorch is; add tch-extension (or torch-sys, if kernels are static) to \
         [dependencies]: cargo tells direct dependents only",
    )?;
    Libtorch::at(lib, env)
}

/// The macro of debug builds.
const DEBUG: &str = "TCH_EXTENSION_DEBUG";

/// The line that tells cargo that CUDA is compiled in.
const CUDA_CFG: &str = "rustc-cfg=tch_extension_cuda";

/// What cargo runs the build script for. Cargo does not tell, so variables do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Programs that are linked.
    Link,
    /// Lints or an editor: Rust is only checked, with CUDA's items or without.
    Check { cuda: bool },
    /// Documentation, as docs.rs builds it.
    Document,
}

impl Purpose {
    pub(super) fn of(env: &dyn Environment) -> Result<Self> {
        let is_document = || {
            let asks = |name| env.var(name).is_some();
            asks("DOCS_RS") || asks("CARGO_FEATURE_DOC_ONLY")
        };
        match env.var("TCH_EXTENSION_CHECK").as_deref() {
            Some("1") => {
                Ok(Self::Check { cuda: env.var("TCH_EXTENSION_CUDA").as_deref() != Some("0") })
            }
            None | Some("0") if is_document() => Ok(Self::Document),
            None | Some("0") => Ok(Self::Link),
            Some(other) => bail!(
                "TCH_EXTENSION_CHECK={other}: write 1 (Rust is only checked and nothing is compiled) or unset it"
            ),
        }
    }

    fn without_compiling(self) -> Option<Built> {
        match self {
            Self::Link => None,
            Self::Check { cuda } => Some(Built { cuda }),
            Self::Document => Some(Built { cuda: false }),
        }
    }
}
