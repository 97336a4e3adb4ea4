//! A library that was compiled and loaded.

use crate::library::{Library, Operator};
use crate::{Error, Result};
use std::marker::PhantomData;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A loaded extension. It is cheap to clone, and it stays loaded until the process ends.
#[derive(Clone)]
pub struct Module(Arc<Loaded>);

struct Loaded {
    name: String,
    path: PathBuf,
    library: Library,
    symbols: libloading::Library,
}

impl Module {
    pub(super) fn open(name: String, path: &Path) -> Result<Self> {
        let failed = |error: &dyn std::fmt::Display| Error::Jit {
            name: name.clone(),
            message: error.to_string(),
        };
        let library = Library::load(path).map_err(|error| failed(&error))?;
        // SAFETY: the library is already loaded, and its initialisers have run.
        let symbols = unsafe { libloading::Library::new(path) }.map_err(|error| failed(&error))?;
        Ok(Module(Arc::new(Loaded { name, path: path.to_path_buf(), library, symbols })))
    }

    /// The name under which it was loaded: the extension's name, perhaps with a suffix `_v1`,
    /// `_v2`, ...
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The path of the shared library, in the cache.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// A function or variable that the library exports; in C++, it must be `extern "C"`.
    ///
    /// `T` is the type of a function, such as `extern "C" fn(f64) -> f64`, or of a pointer to a
    /// variable, such as `*const i32`.
    ///
    /// # Safety
    /// The symbol must be of that type.
    ///
    /// # Errors
    /// When the library has no such symbol, or `T` does not have the size of a pointer.
    pub unsafe fn symbol<T: Copy>(&self, name: &str) -> Result<Symbol<'_, T>> {
        if size_of::<T>() != size_of::<*const ()>() {
            let text = "is neither a function nor a pointer: it does not have a pointer's size";
            return Err(self.error(format!("{name}: {} {text}", std::any::type_name::<T>())));
        }
        // SAFETY: the caller guarantees the symbol's type (see `# Safety`).
        let symbol = unsafe { self.0.symbols.get::<T>(name) };
        let symbol =
            symbol.map_err(|error| self.error(format!("there is no symbol {name:?}: {error}")))?;
        Ok(Symbol { value: *symbol, _library: PhantomData })
    }

    /// One of the operators that the library registered, by its name without the namespace:
    /// `forward` or, with an overload, `forward.overload2`.
    ///
    /// A `PYBIND11_MODULE` registers its operators in the namespace [`Module::name`], one for each
    /// `m.def`. If a name is defined twice, the second definition is its `overload2`, and so on.
    /// For `TORCH_LIBRARY(other, m)`, give the full name: `other::forward`.
    ///
    /// # Errors
    /// When the library has not registered such an operator. The message lists the operators that
    /// it has registered.
    pub fn operator(&self, name: &str) -> Result<Operator> {
        let full =
            if name.contains("::") { name.to_string() } else { format!("{}::{name}", self.0.name) };
        let has = |known: &String| *known == full || known.split('.').next() == Some(&full);
        if !self.operators().iter().any(has) {
            let all = self.operators().join(", ");
            return Err(self.error(format!("there is no operator {full} in it; it has: {all}")));
        }
        Operator::find(&full)
    }

    /// The names of all operators that the library registered, with namespace and overload.
    pub fn operators(&self) -> &[String] {
        self.0.library.operators()
    }

    fn error(&self, message: String) -> Error {
        Error::Jit { name: self.0.name.clone(), message }
    }
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Module").field("name", &self.0.name).field("path", &self.0.path).finish()
    }
}

/// A symbol of a [`Module`]. It dereferences to the function or pointer.
#[derive(Clone, Copy, Debug)]
pub struct Symbol<'a, T> {
    value: T,
    _library: PhantomData<&'a Module>,
}

impl<T> Deref for Symbol<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}
