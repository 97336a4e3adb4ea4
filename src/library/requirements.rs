//! Finds what a library needs and the dynamic loader does not find by itself: parts of libtorch,
//! and Python's library.

use crate::ffi::loader::libtorch_file;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIBPYTHON: &str = "TCH_EXTENSION_LIBPYTHON";

/// The library that must be loaded first, according to the loader's message. `None` if no library
/// would help.
pub(super) fn find(complaint: &str) -> Result<Option<PathBuf>, String> {
    let needs_python = ["undefined symbol: Py", "undefined symbol: _Py"]
        .iter()
        .any(|text| complaint.contains(text));
    if needs_python {
        return libpython(complaint).map(Some);
    }
    let Some((missing, _)) = complaint.split_once(": cannot open shared object file") else {
        return Ok(None);
    };
    if missing.starts_with("libpython") {
        return libpython(complaint).map(Some);
    }
    let Some(folder) = Path::new(&libtorch_file()).parent().map(Path::to_path_buf) else {
        return Ok(None);
    };
    // CUDA's libraries are in other folders, which libtorch_cuda.so refers to.
    let candidates = [missing, "libtorch_cuda.so"].map(|name| folder.join(name));
    let is_cudas = missing.starts_with("libcu") || missing.starts_with("libnv");
    Ok(candidates.into_iter().take(if is_cudas { 2 } else { 1 }).find(|path| path.exists()))
}

/// The undefined symbol that the loader's message names, if it names one.
pub(super) fn undefined_symbol(complaint: &str) -> Option<&str> {
    let (_, rest) = complaint.split_once("undefined symbol: ")?;
    rest.split([',', ' ', ')']).next()
}

fn libpython(complaint: &str) -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os(LIBPYTHON).map(PathBuf::from) {
        return match path.exists() {
            true => Ok(path),
            false => {
                Err(format!("it needs Python, and {LIBPYTHON}={} does not exist", path.display()))
            }
        };
    }
    let version = python_version();
    search(version.as_deref()).ok_or_else(|| {
        let version = version.as_deref().unwrap_or("3");
        format!(
            "it was built for Python, and there is no libpython{version}; set {LIBPYTHON} to the path of one \
             (Debian: apt install libpython{version}; the loader said: {complaint})"
        )
    })
}

/// The version of Python that libtorch was built for, such as `3.11`. A libtorch from a wheel has
/// it in the name of a file.
fn python_version() -> Option<String> {
    let file = libtorch_file();
    let folder = Path::new(&file).parent()?.parent()?;
    let names = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.file_name());
    let digits = names.into_iter().find_map(|name| {
        let digits = name.to_str()?.strip_prefix("_C.cpython-")?.split('-').next()?.to_string();
        digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(digits)
    })?;
    let (major, minor) = digits.split_at_checked(1)?;
    Some(format!("{major}.{minor}"))
}

fn search(version: Option<&str>) -> Option<PathBuf> {
    let named = version.map(|version| format!("python{version}"));
    let programs = named.iter().map(String::as_str).chain(["python3", "python"]);
    let said = programs.filter_map(|program| ask(program, version)).find(|path| path.exists());
    said.or_else(|| {
        let version = version?;
        let folders = [
            "/usr/lib/x86_64-linux-gnu",
            "/usr/lib64",
            "/usr/lib",
            "/usr/local/lib",
            "/usr/local/lib64",
        ];
        let names = [format!("libpython{version}.so.1.0"), format!("libpython{version}.so")];
        let all = folders
            .iter()
            .flat_map(|folder| names.iter().map(move |name| Path::new(folder).join(name)));
        all.into_iter().find(|path| path.exists())
    })
}

/// The path of this interpreter's library, if it has one and is of that version.
fn ask(program: &str, version: Option<&str>) -> Option<PathBuf> {
    const QUESTION: &str = "import sysconfig as s; v = s.get_config_var; \
                            print(v('py_version_short'), v('LIBDIR'), v('INSTSONAME'), sep='\\n')";
    // Isolated mode: the current folder and the user's packages have no influence.
    let output = Command::new(program).args(["-I", "-c", QUESTION]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut lines = text.lines();
    let (found, folder, name) = (lines.next()?, lines.next()?, lines.next()?);
    let suits = version.is_none_or(|version| version == found) && name.contains(".so");
    suits.then(|| Path::new(folder).join(name))
}
