//! The builder of an extension.

use super::cache::{Entry, Locked};
use super::compile::Build;
use super::{Facts, Module, Sources, headers};
use crate::{Error, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard};
use tch_extension_build::place;

/// A builder that turns sources into a [`Module`].
///
/// ```
/// let answer = tch_extension::jit::Extension::new("answer")
///     .cpp("extern \"C\" double scaled(double x) { return SCALE * x; }")
///     .define("SCALE", "3")
///     .load()?;
/// // SAFETY: it is a function of this type.
/// let scaled = unsafe { answer.symbol::<extern "C" fn(f64) -> f64>("scaled") }?;
/// assert_eq!(scaled(14.0), 42.0);
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `load`"]
pub struct Extension {
    name: String,
    sources: Sources,
    cache: Option<PathBuf>,
}

impl Extension {
    /// Makes an extension without sources. The name must be a C++ identifier. In the sources it is
    /// `TORCH_EXTENSION_NAME`.
    pub fn new(name: impl Into<String>) -> Self {
        Extension { name: name.into(), sources: Sources::default(), cache: None }
    }

    /// Adds a source file. A file that ends in `.cu` is CUDA; any other is C++.
    pub fn source(mut self, path: impl Into<PathBuf>) -> Self {
        self.sources.files.push(path.into());
        self
    }

    /// Adds source files.
    pub fn sources(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        self.sources.files.extend(paths.into_iter().map(Into::into));
        self
    }

    /// Adds C++ source text. All C++ texts together are one translation unit, in the order in which
    /// they are added.
    pub fn cpp(mut self, text: impl Into<String>) -> Self {
        self.sources.cpp.push(text.into());
        self
    }

    /// Adds CUDA source text. All CUDA texts together are one translation unit, in the order in
    /// which they are added. nvcc is slow with libtorch's headers: include them in the C++ text
    /// where you can.
    pub fn cuda(mut self, text: impl Into<String>) -> Self {
        self.sources.cuda.push(text.into());
        self
    }

    /// Makes operators from functions that the C++ text defines (or declares, if they are in the
    /// CUDA text). `#include <torch/extension.h>` is then put before the text, and a
    /// `PYBIND11_MODULE` with the functions after it.
    pub fn functions(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.sources.functions.extend(names.into_iter().map(Into::into));
        self
    }

    /// Adds a folder to the include path, before libtorch's own. It does no harm if it contains
    /// headers of Python or pybind11.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Self {
        self.sources.includes.push(folder.into());
        self
    }

    /// Defines a macro, with a value or, for `None`, without one.
    pub fn define<'a>(mut self, name: &str, value: impl Into<Option<&'a str>>) -> Self {
        self.sources.defines.push((name.to_string(), value.into().map(str::to_string)));
        self
    }

    /// Adds a flag for the C++ compiler, after all other flags.
    pub fn flag(mut self, flag: impl Into<String>) -> Self {
        self.sources.flags.push(flag.into());
        self
    }

    /// Adds a flag for nvcc, after all other flags.
    pub fn nvcc_flag(mut self, flag: impl Into<String>) -> Self {
        self.sources.nvcc_flags.push(flag.into());
        self
    }

    /// Adds a flag for the linker, such as `-lblas`.
    pub fn link_flag(mut self, flag: impl Into<String>) -> Self {
        self.sources.link_flags.push(flag.into());
        self
    }

    /// Sets the GPUs to compile for, in the syntax of `TORCH_CUDA_ARCH_LIST`, which it overrides.
    pub fn archs(mut self, list: impl Into<String>) -> Self {
        self.sources.archs = Some(list.into());
        self
    }

    /// Sets the C++ standard, such as `c++20`. The default is `c++17`.
    pub fn standard(mut self, standard: impl Into<String>) -> Self {
        self.sources.standard = standard.into();
        self
    }

    /// Sets whether `torch/extension.h` is compiled once for all extensions, as `use_pch` of
    /// `torch.utils.cpp_extension.load_inline` does. C++ sources that begin with that header then
    /// compile in 0.4 of the time. The first one takes 2.5 times as long, and a file of 500 MB stays
    /// in the cache for each set of flags, include folders and standard: it pays from the fourth
    /// build on. Without g++, or if the headers do not compile by themselves, nothing changes. The
    /// default is `false`.
    pub fn use_pch(mut self, use_pch: bool) -> Self {
        self.sources.use_pch = use_pch;
        self
    }

    /// Sets whether commands, warnings and the time that the build took are printed to standard
    /// error.
    pub fn verbose(mut self, verbose: bool) -> Self {
        self.sources.verbose = verbose;
        self
    }

    /// Sets the folder of the cache, instead of the default folder.
    pub fn cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = Some(folder.into());
        self
    }

    /// Compiles the extension, unless the cache has its library, and loads it. The same sources,
    /// loaded twice, give the same module.
    ///
    /// # Errors
    /// When the name is not an identifier, there are no sources, a path is not UTF-8, the cache
    /// cannot be written, there is no compiler, the compiler or the linker reports an error (the
    /// message quotes it), or the library does not load.
    pub fn load(&self) -> Result<Module> {
        self.check()?;
        let io = |error| self.io_error(error);
        let facts = Facts::gather()?;
        let root = place::root(self.cache.as_deref()).map_err(io)?;
        let includes = headers::install(&root).map_err(io)?;
        let sources = self.sources.clone().absolute().map_err(io)?;
        let names = of_name(&self.name);
        let mut loaded = lock(&names);
        for version in 0_usize.. {
            let name = versioned(&self.name, version);
            let request = format!("{name}\n{}{includes:?}\n{}", facts.text(), sources.text());
            let entry = Entry::new(&root, &name, request);
            if let Some(module) = loaded.get(version) {
                if entry.current().is_some_and(|library| library == module.path()) {
                    return Ok(module.clone());
                }
                continue;
            }
            let build = Build {
                sources: &sources,
                facts: &facts,
                includes: &includes,
                name: &name,
                root: &root,
            };
            let library = entry.library(|folder, scratch| build.library(folder, scratch))?;
            let module = open(name, library)?;
            loaded.push(module.clone());
            return Ok(module);
        }
        Err(Error::msg(format!("jit: {}: loaded too often", self.name)))
    }

    fn check(&self) -> Result<()> {
        let wrong = |argument: &str, expected: &str, got: &str| {
            Err(Error::argument("jit", argument, expected, format!("{got:?}"), ""))
        };
        let identifier = "a C++ identifier (letters, digits and _, at most 100)";
        if !is_identifier(&self.name) {
            return wrong("name", identifier, &self.name);
        }
        if ["aten", "prim"].contains(&self.name.as_str()) {
            return wrong("name", "one that is not libtorch's own", &self.name);
        }
        if let Some(name) = self.sources.functions.iter().find(|name| !is_identifier(name)) {
            return wrong("functions", identifier, name);
        }
        if self.sources.is_empty() {
            return Err(Error::msg(format!(
                "jit: {}: there is no source; add one with source or cpp",
                self.name
            )));
        }
        Ok(())
    }

    fn io_error(&self, error: std::io::Error) -> Error {
        Error::msg(format!(
            "jit: {}: {error}; set TCH_EXTENSION_CACHE to a folder that can be written",
            self.name
        ))
    }
}

/// [`Extension`] for source files: `load("lltm", ["lltm.cpp", "lltm_kernel.cu"])`.
///
/// # Errors
/// As for [`Extension::load`].
pub fn load(name: &str, sources: impl IntoIterator<Item = impl Into<PathBuf>>) -> Result<Module> {
    Extension::new(name).sources(sources).load()
}

/// [`Extension`] for a C++ text and the functions in it that become operators.
///
/// # Errors
/// As for [`Extension::load`].
pub fn load_inline(
    name: &str,
    cpp: &str,
    functions: impl IntoIterator<Item = impl Into<String>>,
) -> Result<Module> {
    Extension::new(name).cpp(cpp).functions(functions).load()
}

/// Loads the library. `library` holds the cache's lock until this returns.
fn open(name: String, library: Locked) -> Result<Module> {
    Module::open(name, &library.library)
}

fn is_identifier(name: &str) -> bool {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    !name.is_empty()
        && name.len() <= 100
        && name.bytes().all(valid)
        && !name.starts_with(|first: char| first.is_ascii_digit())
}

fn versioned(name: &str, version: usize) -> String {
    if version == 0 { name.to_string() } else { format!("{name}_v{version}") }
}

/// The modules that this process has loaded under one name, by version.
type Versions = Arc<Mutex<Vec<Module>>>;

/// Each name has its own lock, so that a build of one extension does not block the others.
fn of_name(name: &str) -> Versions {
    static NAMES: LazyLock<Mutex<HashMap<String, Versions>>> = LazyLock::new(Mutex::default);
    Arc::clone(lock(&NAMES).entry(name.to_string()).or_default())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["a", "_C", "lltm_cuda", "x9"] {
            assert!(is_identifier(good), "{good}");
        }
        for bad in ["", "9x", "a-b", "a b", "a/b", "../a", "ä", "a\0", &"a".repeat(101)] {
            assert!(!is_identifier(bad), "{bad}");
        }
        assert_eq!([0, 1, 12].map(|version| versioned("x", version)), ["x", "x_v1", "x_v12"]);
    }
}
