//! Libraries of functions.

use super::{Function, runtime};
use crate::ffi::tvm_ffi::{self as ffi, Handler};
use crate::library::Library;
use crate::library::near::did_you_mean;
use crate::{Error, Result};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

/// A library that exports functions by TVM FFI. It is cheap to clone, and any thread may use it. It
/// stays loaded until the process ends.
#[derive(Clone)]
pub struct Module(Arc<Inner>);

struct Inner {
    library: Library,
    handle: ffi::Module,
    functions: Vec<String>,
}

impl Module {
    /// Loads a library, and libtvm_ffi if the process does not have it yet. A relative path begins in
    /// the current folder.
    ///
    /// A library that registers a global function twice, or brings a libtvm_ffi of its own, ends the
    /// process that loads it. So a forked child process loads it first, as [`Library::load`]
    /// describes, and a failure there is an error here.
    ///
    /// # Errors
    /// When the file is missing, is no library or no module, or needs a library or a symbol that cannot
    /// be found, as one for another version of CUDA or of libtvm_ffi does; when its initialisers fail;
    /// and when libtvm_ffi cannot be loaded.
    pub fn load(path: impl AsRef<Path>) -> Result<Module> {
        let path = path.as_ref();
        if !path.exists() {
            // Its error names the file, whether or not there is a libtvm_ffi.
            Library::load(path)?;
        }
        let version = runtime::version()?;
        let _handler = Handler::keep();
        let library = Library::load(path).map_err(|error| of_another_version(error, &version))?;
        let cannot = |reason: String| {
            let text = format!("cannot load the module {}: {reason}", library.path().display());
            Error::msg(text.replace('\n', " "))
        };
        if library.path().extension().is_none_or(|extension| extension != "so") {
            return Err(cannot("libtvm_ffi expects a file whose name ends in .so".to_string()));
        }
        let path = CString::new(library.path().as_os_str().as_bytes())
            .map_err(|_| cannot("its path contains a zero byte".to_string()))?;
        let (handle, mut functions) =
            ffi::Module::load(&path).map_err(|error| cannot(error.to_string()))?;
        functions.sort_unstable();
        Ok(Module(Arc::new(Inner { library, handle, functions })))
    }

    /// The path of the file, absolute and with links resolved.
    pub fn path(&self) -> &Path {
        self.0.library.path()
    }

    /// The names of the functions that the library exports, sorted. [`Module::function`] also finds
    /// those of modules that are embedded in it.
    pub fn functions(&self) -> &[String] {
        &self.0.functions
    }

    /// Finds a function by its name. Find it once and call it often.
    ///
    /// # Errors
    /// When there is no such function; the message suggests a similar name.
    pub fn function(&self, name: &str) -> Result<Function> {
        let found = self.0.handle.function(name)?;
        let found = found.ok_or_else(|| {
            let hint = did_you_mean(name, self.functions())
                .unwrap_or_else(|| format!("it has {}", self.functions().join(", ")));
            Error::msg(format!("{} has no function {name}; {hint}", self.path().display()))
        })?;
        Ok(Function::new(name.to_string(), found))
    }

    /// What the library says of a function, in JSON: its signature and its documentation. `None` if it
    /// says nothing, as most libraries do.
    ///
    /// # Errors
    /// An error of libtvm_ffi.
    pub fn metadata(&self, name: &str) -> Result<Option<String>> {
        self.0.handle.metadata(name)
    }
}

/// Names this process's version of libtvm_ffi if a symbol that it lacks is the reason.
fn of_another_version(error: Error, version: &str) -> Error {
    let text = error.to_string();
    let lacks = ["undefined symbol: TVMFFI", "undefined symbol: _ZN3tvm3ffi"];
    if !lacks.iter().any(|symbol| text.contains(symbol)) {
        return error;
    }
    Error::msg(format!(
        "{text}; the module needs another version of libtvm_ffi than {version}, which this process has"
    ))
}

impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Module")
            .field("path", &self.path())
            .field("functions", &self.functions())
            .finish()
    }
}
