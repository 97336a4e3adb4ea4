//! The kernel library: the objects of CUDA sources as one shared library, which many programs can
//! link. An archive of them would be in each program.
//!
//! Its name contains a digest of what it is linked from. It says in a section what it is for, and the
//! symbols that it exports have a version that is made from the declarations of all kernels: the
//! loader refuses a library whose functions take other parameters.

mod facts;

use crate::arch::{self, Arch};
use crate::compile::run_compiler;
use crate::content::digest;
use crate::environment::Environment;
use crate::toolchain::{Libtorch, Object, Reuse, Toolchain, is_cuda};
use crate::{paths, place, probe};
use anyhow::{Context, Result, bail};
use facts::{Asked, Facts, Found, SECTION};
use object::{Object as _, ObjectSymbol as _, SymbolScope};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The variable that chooses how kernels are linked.
pub const VARIABLE: &str = "TCH_EXTENSION_KERNELS";

/// The name of the facts in a library.
const SYMBOL: &str = "tch_extension_kernel_facts";

/// How kernels are linked.
#[derive(Debug, PartialEq, Eq)]
pub enum Form {
    /// As part of the archive of all objects.
    Static,
    /// As a shared library of this build's objects.
    Shared,
    /// From a library that somebody else has built.
    Prebuilt(PathBuf),
}

impl Form {
    /// What the variable says.
    pub fn chosen(env: &dyn Environment) -> Result<Self> {
        let Some(chosen) = env.var(VARIABLE) else { return Ok(Form::Static) };
        match chosen.as_str() {
            "static" => return Ok(Form::Static),
            "shared" => return Ok(Form::Shared),
            _ => {}
        }
        let path = Path::new(&chosen);
        if !path.is_absolute() || !path.is_file() {
            let what = if path.is_absolute() { "there is no such file; " } else { "" };
            bail!(
                "{VARIABLE}={chosen}: {what}write shared, static, or the absolute path of a library, which `python3 -m \
                 tch_extension kernels` prints"
            );
        }
        // It may be a link that will point to another library.
        env.reads(path);
        Ok(Form::Prebuilt(path.canonicalize()?))
    }
}

/// A library of kernels to link.
#[derive(Debug)]
pub struct Library {
    pub path: PathBuf,
    /// The folders in which a program looks for it, in this order.
    pub folders: Vec<PathBuf>,
}

impl Library {
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("."))
    }

    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// The functions that a library of all kernels exports, and their version: a linker script that
/// `cargo xtask headers` generates.
#[derive(Debug, PartialEq, Eq)]
pub struct Exports {
    /// The folder that it is in, with a folder for each family.
    root: PathBuf,
    node: String,
    names: Vec<String>,
}

impl Exports {
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let root = path.parent().unwrap_or(Path::new(""));
        Self::parse(root, &text)
            .with_context(|| format!("{} is no list of exports", path.display()))
    }

    fn parse(root: &Path, text: &str) -> Option<Self> {
        let (head, body) = text.split_once('{')?;
        let node = head.lines().last()?.trim().to_string();
        let words = body.split(['{', '}', ';']).map(str::trim);
        let names = words.map(|word| word.trim_start_matches("global:").trim());
        let names = names.filter(|name| name.starts_with("tch_extension_"));
        let names = names.map(str::to_string).collect();
        Some(Exports { root: root.to_path_buf(), node, names })
    }

    fn script(&self, defined: &BTreeSet<String>) -> String {
        let names = self.names.iter().filter(|name| defined.contains(*name));
        let names: String = names.map(|name| format!("    {name};\n")).collect();
        format!("{} {{\n  global:\n{names}  local:\n    *;\n}};\n", self.node)
    }
}

/// The kernels that an extension wants.
pub struct Wanted<'a> {
    pub exports: Exports,
    pub sources: &'a [PathBuf],
    /// The major version of libtorch's CUDA.
    pub cuda: u32,
}

impl Wanted<'_> {
    fn facts(&self, archs: &[Arch], env: &dyn Environment) -> Facts {
        let flags = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"].map(|name| env.var(name));
        let flags: Vec<String> = flags.into_iter().flatten().collect();
        // csrc/loss/rows.cu belongs to `loss`.
        let family = |source: &PathBuf| {
            let inside = source.strip_prefix(&self.exports.root).ok()?;
            Some(inside.iter().next()?.to_string_lossy().into_owned())
        };
        Facts {
            version: env.var("CARGO_PKG_VERSION").unwrap_or_default(),
            node: self.exports.node.clone(),
            cuda: self.cuda,
            archs: archs.to_vec(),
            families: self
                .sources
                .iter()
                .filter(|source| is_cuda(source))
                .filter_map(family)
                .collect(),
            flags: format!("{:?}", flags.join(" ")),
        }
    }

    /// A library that somebody else has built, if it has what is wanted.
    pub fn prebuilt(
        &self,
        path: &Path,
        libtorch: &Libtorch,
        env: &dyn Environment,
    ) -> Result<Library> {
        paths::check(VARIABLE, path)?;
        env.reads(path);
        let found = Found::read(path)?;
        let refusal = found.refusal(path, &self.facts(&[], env), &libtorch.cuda_runtime()?);
        if let Some(refusal) = refusal {
            bail!(
                "the kernel library {} {refusal}; unset {VARIABLE} to compile the kernels",
                path.display()
            );
        }
        if let Some(lack) = found.facts.lack(&Asked::of(env, &arch::visible_gpus)?) {
            bail!(
                "the kernel library {} {lack}; unset {VARIABLE} to compile the kernels, or set TORCH_CUDA_ARCH_LIST to \
                 what the library has",
                path.display()
            );
        }
        let folder = path.parent().unwrap_or(Path::new("/")).to_path_buf();
        let folders = can_be_searched(folder, env).into_iter().collect();
        Ok(Library { path: path.to_path_buf(), folders })
    }

    /// Links these objects of CUDA sources. The library is in the cache and in a folder of the build
    /// script's output, so that a program finds it when one of the two is gone.
    pub fn link(
        &self,
        objects: &[Object],
        toolchain: &Toolchain,
        out_dir: &Path,
        reuse: &Reuse,
        env: &dyn Environment,
    ) -> Result<Library> {
        let archs = toolchain.cuda.as_ref().map(|cuda| &cuda.archs[..]);
        let facts = self.facts(archs.unwrap_or_default(), env).text();
        let (defined, contents) = self.read(objects)?;
        let script = self.exports.script(&defined);
        let runtime = toolchain.libtorch.cuda_runtime()?;
        let runtime_name = runtime.file_name().unwrap_or_default().to_string_lossy();
        let parts = [facts.as_bytes(), script.as_bytes(), runtime_name.as_bytes()];
        let digest = digest(parts.into_iter().chain(contents.iter().map(Vec::as_slice)));
        let name = format!("{}{}.so", place::LIBRARY_PREFIX, &digest[..16]);

        let folder = out_dir.join(place::KERNELS);
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let source = written(&folder, "facts.cpp", &source_of(&facts))?;
        let exports = written(&folder, "exports.map", &script)?;
        let arguments = self.arguments(objects, &[source, exports], &name, &runtime);
        written(&folder, place::LINK, &arguments.join("\n"))?;
        let path = folder.join(&name);
        let partial = folder.join("partial");
        let mut command = toolchain.cxx.command();
        command.args(&arguments).arg("-o").arg(&partial);
        run_compiler(&mut command, "the kernel library does not link", env)?;
        std::fs::rename(&partial, &path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        let mut folders = Vec::new();
        if let Reuse::Cache(cache) = reuse {
            match keep_in(cache, &path) {
                Ok(kept) => folders.extend(can_be_searched(kept, env)),
                Err(error) => env.warns(&format!(
                    "the cache does not keep the kernel library, so programs find it only in {}: {error}",
                    folder.display()
                )),
            }
        }
        // `cargo install` builds in the folder of temporary files and removes what it has built. Anyone
        // could make the folder again.
        if folders.is_empty() || !is_below(&folder, &env.temporary()) {
            folders.extend(can_be_searched(folder, env));
        }
        Ok(Library { path, folders })
    }

    /// The names that the objects define for others, and the objects' contents.
    fn read(&self, objects: &[Object]) -> Result<(BTreeSet<String>, Vec<Vec<u8>>)> {
        let mut defined = BTreeSet::new();
        let mut contents = Vec::new();
        for object in objects {
            let bytes = std::fs::read(&object.path)
                .with_context(|| format!("cannot read {}", object.path.display()))?;
            let file = object::File::parse(&*bytes)?;
            for symbol in file.symbols().filter(|symbol| !symbol.is_undefined()) {
                let name = symbol.name().unwrap_or_default();
                let is_exported = || self.exports.names.iter().any(|known| known == name);
                match symbol.scope() {
                    SymbolScope::Dynamic => _ = defined.insert(name.to_string()),
                    SymbolScope::Linkage if is_exported() => bail!(
                        "{} hides {name}; include its declaration and define it outside of all namespaces",
                        object.source.display()
                    ),
                    _ => {}
                }
            }
            contents.push(bytes);
        }
        Ok((defined, contents))
    }

    /// The arguments of the compiler that links.
    fn arguments(
        &self,
        objects: &[Object],
        [source, exports]: &[String; 2],
        name: &str,
        runtime: &Path,
    ) -> Vec<String> {
        let mut arguments = vec!["-shared".to_string(), "-fPIC".to_string(), source.clone()];
        arguments.extend(objects.iter().map(|object| object.path.display().to_string()));
        arguments.extend([
            // Undefined symbols are reported now and not when it is loaded. It is never unloaded, because
            // CUDA keeps pointers to its kernels.
            "-Wl,-z,defs,-z,nodelete,--as-needed".to_string(),
            format!("-Wl,-soname,{name}"),
            // The linker keeps what nothing uses, even with --gc-sections.
            format!("-Wl,--undefined={SYMBOL}"),
            // -Wl would split a path at its commas.
            "-Xlinker".to_string(),
            format!("--version-script={exports}"),
            // The program has loaded the runtime that libtorch loads. In a wheel, it is here.
            format!("-Wl,-rpath,$ORIGIN/../nvidia/cu{}/lib", self.cuda),
            format!("-L{}", runtime.parent().unwrap_or(Path::new(".")).display()),
            format!("-l:{}", runtime.file_name().unwrap_or_default().to_string_lossy()),
        ]);
        arguments
    }
}

/// C++ that puts the facts into a section.
fn source_of(facts: &str) -> String {
    format!(
        "extern const char {SYMBOL}[];\n__attribute__((section(\"{SECTION}\"), used)) const char {SYMBOL}[] = \
         R\"facts({facts})facts\";\n"
    )
}

/// Writes a file and returns its path.
fn written(folder: &Path, name: &str, text: &str) -> Result<String> {
    let path = folder.join(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path.display().to_string())
}

/// The folder, if the loader can search it.
fn can_be_searched(folder: PathBuf, env: &dyn Environment) -> Option<PathBuf> {
    let can = !folder.to_string_lossy().contains(':');
    if !can {
        env.warns(&format!(
            "programs do not look for the kernel library in {}, whose name has a colon",
            folder.display()
        ));
    }
    can.then_some(folder)
}

fn is_below(folder: &Path, other: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    whole(folder).starts_with(whole(other))
}

/// The folder of CUDA's headers for a build that needs no nvcc: the one next to libtorch's own runtime,
/// or a toolkit's, whose major version is that of libtorch's CUDA.
pub fn headers(libtorch: &Libtorch, cuda: u32, env: &dyn Environment) -> Result<PathBuf> {
    let runtime = libtorch.cuda_runtime()?;
    let homes = probe::nvcc_candidates(&libtorch.lib, &|name| env.var(name)).into_iter();
    let homes = homes.filter(|(source, nvcc)| source != "PATH" || nvcc.is_file());
    let homes = std::iter::once(runtime).chain(homes.map(|(_, nvcc)| nvcc));
    let mut tried: Vec<PathBuf> =
        homes.filter_map(|file| Some(file.parent()?.parent()?.join("include"))).collect();
    tried.dedup();
    let is_fit = |folder: &&PathBuf| cuda_of_headers(folder) == Some(cuda);
    let Some(folder) = tried.iter().find(is_fit) else {
        let tried: Vec<String> = tried.iter().map(|folder| folder.display().to_string()).collect();
        bail!(
            "there are no headers of CUDA {cuda}, which C++ needs even if no kernel is compiled; set CUDA_HOME to a \
             toolkit that has them. Tried: {}",
            tried.join(", ")
        );
    };
    env.reads(&folder.join(RUNTIME_HEADER));
    Ok(folder.clone())
}

const RUNTIME_HEADER: &str = "cuda_runtime_api.h";

/// The major version of the CUDA headers in a folder.
fn cuda_of_headers(folder: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(folder.join(RUNTIME_HEADER)).ok()?;
    let version = text.lines().find_map(|line| line.strip_prefix("#define CUDART_VERSION"))?;
    Some(version.trim().parse::<u32>().ok()? / 1000)
}

/// Copies a library to the cache and returns its folder there.
fn keep_in(cache: &Path, library: &Path) -> std::io::Result<PathBuf> {
    let folder = place::root(Some(cache))?.join(place::KERNELS);
    let bytes = std::fs::read(library)?;
    let name = library.file_name().unwrap_or_default().to_string_lossy();
    place::publish(&folder, &name, &bytes)?;
    let age = Duration::from_secs(place::LIBRARY_DAYS * 24 * 60 * 60);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let oldest = now.saturating_sub(age).as_secs();
    let mut libraries = place::stored_in(&folder);
    libraries.sort_by_key(|library| Reverse(library.used));
    for library in libraries.iter().skip(place::MOST_LIBRARIES) {
        // Programs may need one that was built not long ago.
        if library.used.0 < oldest as i64 {
            let _ = std::fs::remove_file(&library.path);
        }
    }
    Ok(folder)
}
