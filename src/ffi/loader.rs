//! Bindings to `csrc/library/loader.cpp`.

use super::take_message;
use std::ffi::{CStr, CString, c_char};
use std::time::Duration;

unsafe extern "C" {
    fn tch_extension_rehearse(
        paths: *const *const c_char,
        len: usize,
        global: bool,
        limit_ms: i64,
    ) -> *mut c_char;
    fn tch_extension_defines(path: *const c_char, symbol: *const c_char) -> bool;
    fn tch_extension_open_library(
        path: *const c_char,
        global: bool,
        operators: *mut *mut c_char,
    ) -> *mut c_char;
    safe fn tch_extension_libtorch_file() -> *mut c_char;
    safe fn tch_extension_libtorch_version() -> *mut c_char;
    fn tch_extension_demangled(symbol: *const c_char) -> *mut c_char;
}

/// The message of [`rehearse`] for initialisers that do not end.
pub(crate) const TOO_LONG: &str = "its initialisers did not end in time";

/// Loads these libraries in a child process: the last one as [`open_library`] would with this
/// `global`, and the earlier ones so that the last one finds their symbols.
pub(crate) fn rehearse(
    paths: &[CString],
    global: bool,
    limit: Duration,
) -> std::result::Result<(), String> {
    let pointers: Vec<*const c_char> = paths.iter().map(|path| path.as_ptr()).collect();
    let limit = i64::try_from(limit.as_millis()).unwrap_or(i64::MAX);
    // SAFETY: the texts are null-terminated and live during the call. Whoever names a library is
    // responsible for what its initialisers do; here they run in another process.
    let message =
        unsafe { tch_extension_rehearse(pointers.as_ptr(), pointers.len(), global, limit) };
    take_message(message).map_or(Ok(()), Err)
}

/// Loads a library into this process for good. If `global`, other libraries find its symbols.
/// Returns the names of the operators that it registered, one per line.
pub(crate) fn open_library(path: &CStr, global: bool) -> std::result::Result<String, String> {
    let mut operators = std::ptr::null_mut();
    // SAFETY: the text is null-terminated. Whoever names a library is responsible for what its
    // initialisers do. We own the names.
    let message = unsafe { tch_extension_open_library(path.as_ptr(), global, &mut operators) };
    match take_message(message) {
        Some(message) => Err(message),
        None => Ok(take_message(operators).unwrap_or_default()),
    }
}

/// Whether this loaded library, or one that it depends on, defines the symbol.
pub(crate) fn defines(path: &CStr, symbol: &str) -> bool {
    let Ok(symbol) = CString::new(symbol) else { return false };
    // SAFETY: the texts are null-terminated and live during the call.
    unsafe { tch_extension_defines(path.as_ptr(), symbol.as_ptr()) }
}

/// The path of a file of the libtorch that this process uses.
pub(crate) fn libtorch_file() -> String {
    take_message(tch_extension_libtorch_file()).unwrap_or_default()
}

/// The version of the libtorch whose headers the C++ was compiled with, such as `2.11.0`.
pub(crate) fn libtorch_version() -> String {
    take_message(tch_extension_libtorch_version()).unwrap_or_default()
}

/// A symbol's name as the C++ source has it. A symbol that is not C++'s is returned unchanged.
pub(crate) fn demangled(symbol: &str) -> String {
    let Ok(terminated) = CString::new(symbol) else { return symbol.to_string() };
    // SAFETY: the text is null-terminated and lives during the call.
    take_message(unsafe { tch_extension_demangled(terminated.as_ptr()) }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rehearsal_that_hangs_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("hangs.cpp"), folder.path().join("hangs.so"));
        std::fs::write(&source, "#include <unistd.h>\nstruct A { A() { for (;;) pause(); } } a;")
            .unwrap();
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
        let mut command = std::process::Command::new(compiler);
        assert!(
            command
                .args(["-shared", "-fPIC", "-o"])
                .args([&library, &source])
                .status()
                .unwrap()
                .success()
        );
        let path = CString::new(library.to_str().unwrap()).unwrap();
        let outcome = rehearse(&[path], false, Duration::from_millis(500));
        assert_eq!(outcome, Err(TOO_LONG.to_string()));
    }
}
