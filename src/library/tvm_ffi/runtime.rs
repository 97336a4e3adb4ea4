//! The library libtvm_ffi.

use crate::ffi::tvm_ffi::{self as ffi, Handler, Presence};
use crate::library::{Library, LoadOptions};
use crate::{Error, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

const VARIABLE: &str = "TCH_EXTENSION_TVM_FFI";

/// The first two numbers of the versions that are supported.
pub(in crate::library) const SUPPORTED: (u32, u32) = (0, 1);

/// The version of libtvm_ffi, which is loaded if the process does not have it yet. It may be one more
/// than the version of the Python package, whose fixes it contains.
///
/// # Errors
/// When it cannot be found or loaded, or is of a version that is not supported.
pub fn version() -> Result<String> {
    static VERSION: OnceLock<[u32; 3]> = OnceLock::new();
    let [major, minor, patch] = match VERSION.get() {
        Some(version) => *version,
        None => *VERSION.get_or_init({
            let version = attach()?;
            move || version
        }),
    };
    Ok(format!("{major}.{minor}.{patch}"))
}

fn attach() -> Result<[u32; 3]> {
    let version = match ffi::attach()? {
        Presence::Global(version) => version,
        // A second copy would end the process, and this makes the first one global.
        Presence::Local(path) => load(Path::new(&path))?,
        Presence::Absent => load(&find()?)?,
    };
    let [major, minor, patch] = version;
    if (major, minor) == SUPPORTED {
        return Ok(version);
    }
    Err(Error::msg(format!(
        "libtvm_ffi: expected version 0.1.x, got {major}.{minor}.{patch}; `pip install 'apache-tvm-ffi<0.2'`"
    )))
}

fn load(path: &Path) -> Result<[u32; 3]> {
    // Its initialisers replace the handler by which Rust reports that a stack has overflown.
    let _handler = Handler::keep();
    // Modules need its symbols and may not name it as a library that they need.
    Library::load_with(path, LoadOptions { global: true, ..Default::default() })?;
    match ffi::attach()? {
        Presence::Global(version) => Ok(version),
        _ => Err(Error::msg(format!(
            "{}: expected libtvm_ffi.so, got a library without its functions; set {VARIABLE} to its path",
            path.display()
        ))),
    }
}

fn find() -> Result<PathBuf> {
    match std::env::var_os(VARIABLE).map(PathBuf::from) {
        Some(path) if path.is_file() => Ok(path),
        Some(path) => Err(Error::msg(format!(
            "{VARIABLE}: expected the path of libtvm_ffi.so, got {}, which is no file",
            path.display()
        ))),
        None => ask("python3").ok_or_else(|| {
            Error::msg(format!(
                "functions of TVM FFI need libtvm_ffi.so, and python3 has no package with it: \
                 `pip install apache-tvm-ffi`, or set {VARIABLE} to its path"
            ))
        }),
    }
}

/// The library in this interpreter's package, which is not imported.
fn ask(program: &str) -> Option<PathBuf> {
    const QUESTION: &str =
        "import importlib.util as u; print(u.find_spec('tvm_ffi').submodule_search_locations[0])";
    let output = Command::new(program).args(["-c", QUESTION]).output().ok()?;
    if !output.status.success() {
        return None;
    }
    let folder = String::from_utf8(output.stdout).ok()?;
    let path = Path::new(folder.trim()).join("lib/libtvm_ffi.so");
    (path.is_absolute() && path.is_file()).then_some(path)
}
