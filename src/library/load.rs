//! Libraries of operators.

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

/// A shared library that registered operators. Cheap to clone; it stays loaded until the process
/// ends, also when no handle is left, because libtorch's dispatcher keeps what it registered.
#[derive(Clone)]
pub struct Library(Arc<Loaded>);

struct Loaded {
    path: PathBuf,
    operators: Vec<String>,
    /// What the file was like, and the file itself: as long as it is open, no other file gets its
    /// number.
    state: State,
    _file: File,
}

/// How [`Library::load_with`] loads.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Libraries that are loaded afterwards find this one's symbols (`RTLD_GLOBAL`), as one needs
    /// that calls functions of another without naming it. Off by default, because two libraries may
    /// well define different functions of one name: those of a global one take the place of theirs.
    /// A library that is loaded already becomes global.
    pub global: bool,
    /// Load it in a child process first; see [`Library::load`]. On by default.
    pub rehearsal: bool,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { global: false, rehearsal: true }
    }
}

/// To see that a file has changed.
#[derive(PartialEq)]
struct State {
    len: u64,
    modified: (i64, i64),
}

/// Device and number of a file.
type Id = (u64, u64);

/// Initialisers that take longer than the last are taken to hang. The first tries are short,
/// because a child may hang for another reason: a lock that a thread of the parent's held when the
/// child was made. The next is made without it.
const REHEARSAL_LIMITS: [Duration; 3] =
    [Duration::from_secs(2), Duration::from_secs(5), Duration::from_secs(30)];

impl Library {
    /// Loads a library, or returns the handle if this very file is loaded already.
    ///
    /// A library whose registration libtorch refuses (a namespace that another `TORCH_LIBRARY` has
    /// taken, an operator that exists) would abort the process. So it is first loaded in a forked
    /// child process, and what fails there is an error here, with nothing loaded. Its initialisers
    /// therefore run twice, in two processes, and in the child they have one thread and no GPU.
    ///
    /// A library that was built for Python (one that links `libtorch_python`) needs a `libpython`
    /// of the version that libtorch was built for; no interpreter is started in this process. It is
    /// looked for in `TCH_EXTENSION_LIBPYTHON`, then where `python3` says, then in the usual
    /// folders.
    ///
    /// # Errors
    /// A file that is missing, no library, changed since it was loaded, or lacks a library or
    /// symbol that it needs; a registration that libtorch refuses.
    pub fn load(path: impl AsRef<Path>) -> crate::Result<Library> {
        Library::load_with(path, LoadOptions::default())
    }

    /// [`Library::load`] in another way.
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
    /// As [`Library::load`].
    pub fn load_with(path: impl AsRef<Path>, options: LoadOptions) -> crate::Result<Library> {
        load(path.as_ref(), options).map_err(|reason| cannot_load(path.as_ref(), &reason))
    }

    /// [`Library::load`] for a process that must not fork, or a library whose initialisers must run
    /// only once. One that libtorch refuses aborts the process.
    ///
    /// # Errors
    /// As [`Library::load`], but for what libtorch refuses.
    pub fn load_without_rehearsal(path: impl AsRef<Path>) -> crate::Result<Library> {
        Library::load_with(path, LoadOptions { rehearsal: false, ..Default::default() })
    }

    /// The file, as an absolute path without links.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The names of the operators that it registered, in order, for
    /// [`Operator::find`](super::Operator::find): those of its own initialisers. Not in it are
    /// operators of libraries that it needs (loading one of those lists them), operators that other
    /// threads registered meanwhile, and kernels for operators of others. Of a library that
    /// something else had loaded before, nothing is known.
    pub fn operators(&self) -> &[String] {
        &self.0.operators
    }

    /// Whether both are handles of one library.
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

/// All libraries that were loaded here. Locked while one is loaded, so that none is loaded twice.
static REGISTRY: Mutex<BTreeMap<Id, Library>> = Mutex::new(BTreeMap::new());

fn load(path: &Path, options: LoadOptions) -> Result<Library, String> {
    let words = |error: std::io::Error| error.to_string();
    let named = std::path::absolute(path).map_err(words)?;
    let path = path.canonicalize().map_err(words)?;
    let file = File::open(&path).map_err(words)?;
    let metadata = file.metadata().map_err(words)?;
    if !metadata.is_file() {
        return Err("it is no file".to_string());
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
    // The loader goes by names, and would hand out the old one.
    if registry.values().any(|library| library.0.path == path) {
        return Err(format!("another file of this name is loaded; {NEW_NAME}"));
    }
    // By the name that was given: `$ORIGIN` in it is the folder of the link, if it is one.
    let operators = open(&named, options).map_err(|reason| explained(&named, reason, &registry))?;
    let library = Library(Arc::new(Loaded { path, operators, state, _file: file }));
    registry.insert(id, library.clone());
    Ok(library)
}

const NEW_NAME: &str = "libraries never unload, so give a new one a new name";

/// The loader's complaint with what it means, if that can be told.
fn explained(path: &Path, complaint: String, loaded: &BTreeMap<Id, Library>) -> String {
    let symbol = requirements::undefined_symbol(&complaint);
    let defines = |library: &&Library| {
        let path = c_path(&library.0.path);
        symbol.zip(path.ok()).is_some_and(|(symbol, path)| ffi::defines(&path, symbol))
    };
    if let (Some(symbol), Some(library)) = (symbol, loaded.values().find(defines)) {
        return format!(
            "it needs {} of {}, which is loaded for itself alone: load that one {GLOBAL} first (the loader said: {complaint})",
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

/// Tries until nothing is missing that could be found. Returns the operators that the library
/// registered.
fn open(path: &Path, options: LoadOptions) -> Result<Vec<String>, String> {
    let mut paths = vec![c_path(path)?];
    let attempt = |paths: &[CString]| match options.rehearsal {
        true => rehearse(paths, options.global),
        false => open_all(paths, options.global).map(drop),
    };
    while let Err(reason) = attempt(&paths) {
        let found = requirements::find(&reason)?.map(|found| c_path(&found)).transpose()?;
        match found {
            // What was missed last is needed by those before.
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

/// The last one is the one that is wanted, and whose operators are returned; the others are for it
/// to find its symbols in.
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
