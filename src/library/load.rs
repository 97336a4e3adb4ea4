//! Shared libraries of operators.

use super::{mismatch, requirements};
use crate::Error;
use crate::ffi::loader as ffi;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A shared library that registered operators. It is cheap to clone. It stays loaded until the
/// process ends, even if no handle is left, because libtorch's dispatcher keeps what it registered.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

struct Loaded {
    path: PathBuf,
    operators: Vec<String>,
    /// The state of the file when it was loaded, and the open file itself: as long as it is open,
    /// no other file gets its inode number.
    state: State,
    _file: File,
}

/// The options of [`Library::load_with`].
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Lets libraries that are loaded later find this library's symbols (`RTLD_GLOBAL`). That is
    /// needed if they call its functions without being linked to it. It is off by default, because
    /// two libraries may define different functions of the same name, and a global library's
    /// functions would replace those of the others. A library that is already loaded becomes
    /// global.
    pub global: bool,
    /// Load the library in a child process first; see [`Library::load`]. It is on by default.
    pub rehearsal: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { global: false, rehearsal: true }
    }
}

/// Properties of a file that show whether it has changed.
#[derive(PartialEq)]
struct State {
    len: u64,
    modified: (i64, i64),
}

/// The device and inode number of a file.
type Id = (u64, u64);

/// The time limits of the tries in a child process. Initialisers that take longer than the last
/// limit are considered to hang. The first limits are short, because a child may also hang for
/// another reason: a thread of the parent held a lock when the child was forked. The next child is
/// forked at another moment, without that lock.
const REHEARSAL_LIMITS: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_secs(5), Duration::from_secs(30)];

impl Library {
    /// Loads a library, or returns its handle if this very file is loaded already.
    ///
    /// If libtorch refuses a registration (because another `TORCH_LIBRARY` has taken the namespace,
    /// or the operator exists), loading the library would abort the process. So the library is
    /// first loaded in a forked child process, and a failure there is an error here, with nothing
    /// loaded. The library's initialisers therefore run twice, in two processes, and in the child
    /// they have one thread and no GPU.
    ///
    /// A library that was built for Python (one that links `libtorch_python`) needs a `libpython`
    /// of the version that libtorch was built for. No interpreter is started in this process.
    /// `libpython` is searched for first in `TCH_EXTENSION_LIBPYTHON`, then where `python3` says it
    /// is, then in the usual folders.
    ///
    /// # Errors
    /// When the file is missing, is not a library, has changed since it was loaded, or needs a
    /// library or a symbol that cannot be found; or when libtorch refuses a registration.
    pub fn load(path: impl AsRef<Path>) -> crate::Result<Library> {
        Library::load_with(path, LoadOptions::default())
    }

    /// Like [`Library::load`], with options.
    ///
    /// ```no_run
    /// use tch_extension::library::{Library, LoadOptions};
    ///
    /// // The second calls functions of the first, and does not name it as a library that it needs.
    /// Library::load_with("libfirst.so", LoadOptions { global: true, ..Default::default() })?;
    /// Library::load("libsecond.so")?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Library::load`].
    pub fn load_with(path: impl AsRef<Path>, options: LoadOptions) -> crate::Result<Library> {
        load(path.as_ref(), options).map_err(|reason| cannot_load(path.as_ref(), &reason))
    }

    /// Like [`Library::load`], for a process that must not fork, or for a library whose
    /// initialisers must run only once. If libtorch refuses a registration, the process aborts.
    ///
    /// # Errors
    /// As for [`Library::load`], except for registrations that libtorch refuses.
    pub fn load_without_rehearsal(path: impl AsRef<Path>) -> crate::Result<Library> {
        Library::load_with(path, LoadOptions { rehearsal: false, ..Default::default() })
    }

    /// The path of the file, absolute and with links resolved.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The names of the operators that the library's own initialisers registered, sorted, for
    /// [`Operator::find`](super::Operator::find). The list does not contain operators of libraries
    /// that it depends on (load one of those to list them), operators that other threads registered
    /// meanwhile, or kernels for operators of other libraries. If something else had loaded the
    /// library before, its operators are not known.
    pub fn operators(&self) -> &[String] {
        &self.0.operators
    }

    /// Whether both handles are of the same library.
    pub fn is_same(&self, other: &Library) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library")
            .field("path", &self.0.path)
            .field("operators", &self.0.operators)
            .finish()
    }
}

fn cannot_load(path: &Path, reason: &str) -> Error {
    let text = format!("cannot load the library {}: {}", path.display(), reason.trim_end());
    Error::msg(text.replace('\n', " "))
}

/// All libraries that were loaded here. It is locked while one is loaded, so that none is loaded
/// twice.
static REGISTRY: Mutex<BTreeMap<Id, Library>> = Mutex::new(BTreeMap::new());

fn load(path: &Path, options: LoadOptions) -> Result<Library, String> {
    let words = |error: std::io::Error| error.to_string();
    let named = std::path::absolute(path).map_err(words)?;
    let path = path.canonicalize().map_err(words)?;
    let file = File::open(&path).map_err(words)?;
    let metadata = file.metadata().map_err(words)?;
    if !metadata.is_file() {
        return Err("it is not a regular file".to_string());
    }
    let id = (metadata.dev(), metadata.ino());
    let state = State { len: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) };
    let mut registry = REGISTRY.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(library) = registry.get(&id) {
        if library.0.state != state {
            return Err(format!("it has changed since it was loaded; {NEW_NAME}"));
        }
        if options.global {
            ffi::open_library(&c_path(&named)?, true)?;
        }
        return Ok(library.clone());
    }
    // The dynamic loader identifies libraries by name, and would return the old one.
    if registry.values().any(|library| library.0.path == path) {
        return Err(format!("another file of this name is loaded; {NEW_NAME}"));
    }
    // Open it by the name that was given: if it is a symbolic link, `$ORIGIN` in the library means
    // the folder of the link.
    let operators = open(&named, options).map_err(|reason| explained(&named, reason, &registry))?;
    let library = Library(Arc::new(Loaded { path, operators, state, _file: file }));
    registry.insert(id, library.clone());
    Ok(library)
}

const NEW_NAME: &str = "libraries never unload, so give a new one a new name";

/// Adds an explanation to the dynamic loader's message, if there is one.
fn explained(path: &Path, complaint: String, loaded: &BTreeMap<Id, Library>) -> String {
    let symbol = requirements::undefined_symbol(&complaint);
    let defines = |library: &&Library| {
        let path = c_path(&library.0.path);
        symbol.zip(path.ok()).is_some_and(|(symbol, path)| ffi::defines(&path, symbol))
    };
    if let (Some(symbol), Some(library)) = (symbol, loaded.values().find(defines)) {
        return format!(
            "it needs {} of {}, which was loaded without `global`: load that one {GLOBAL} first (the loader said: {complaint})",
            ffi::demangled(symbol),
            library.0.path.display(),
        );
    }
    match mismatch::explain(path, &complaint) {
        Some(explained) => explained,
        None if symbol.is_some() => {
            format!("{complaint}; a library that defines it has to be loaded before, {GLOBAL}")
        }
        None => complaint,
    }
}

const GLOBAL: &str = "with LoadOptions { global: true, .. }";

/// Tries to open the library, each time with one more library that it lacked, until it opens or
/// nothing more can be found. Returns the operators that the library registered.
fn open(path: &Path, options: LoadOptions) -> Result<Vec<String>, String> {
    let mut paths = vec![c_path(path)?];
    let attempt = |paths: &[CString]| match options.rehearsal {
        true => rehearse(paths, options.global),
        false => open_all(paths, options.global).map(drop),
    };
    while let Err(reason) = attempt(&paths) {
        let found = requirements::find(&reason)?.map(|found| c_path(&found)).transpose()?;
        match found {
            // A library that was missed later is needed by those before it, so it comes first.
            Some(found) if !paths.contains(&found) => paths.insert(0, found),
            _ => return Err(reason),
        }
    }
    open_all(&paths, options.global)
}

fn rehearse(paths: &[CString], global: bool) -> Result<(), String> {
    let mut outcome = Ok(());
    for limit in REHEARSAL_LIMITS {
        outcome = ffi::rehearse(paths, global, limit);
        if outcome.as_ref().err().is_none_or(|reason| reason != ffi::TOO_LONG) {
            break;
        }
    }
    outcome
}

/// Opens all libraries. The last one is the library that was asked for, and its operators are
/// returned; the others only provide symbols for it.
fn open_all(paths: &[CString], global: bool) -> Result<Vec<String>, String> {
    let last = paths.len().saturating_sub(1);
    let mut names = String::new();
    for (index, path) in paths.iter().enumerate() {
        names = ffi::open_library(path, global || index < last)?;
    }
    let mut operators: Vec<String> = names.lines().map(String::from).collect();
    operators.sort_unstable();
    Ok(operators)
}

fn c_path(path: &Path) -> Result<CString, String> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| "its path contains a zero byte".to_string())
}
