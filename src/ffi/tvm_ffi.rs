//! Bindings to `csrc/tvm_ffi`.

use super::library::{CResults, Results};
use super::value::{Output, RawValue, Value};
use super::{take_message, text};
use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, MutexGuard};
use tch::Tensor;
use torch_sys::C_tensor;

#[repr(C)]
#[derive(Default)]
struct TvmFfiCallError {
    kind: i32,
    argument: i32,
}

unsafe extern "C" {
    fn tch_extension_tvm_ffi_attach(version: *mut u32, path: *mut *mut c_char) -> *mut c_char;
    safe fn tch_extension_tvm_ffi_keep_handler() -> *mut c_void;
    fn tch_extension_tvm_ffi_restore_handler(handler: *mut c_void);
    fn tch_extension_tvm_ffi_load(
        path: *const c_char,
        module: *mut *mut c_void,
        names: *mut *mut c_char,
    ) -> *mut c_char;
    fn tch_extension_tvm_ffi_function(
        module: *mut c_void,
        name: *const c_char,
        len: usize,
        function: *mut *mut c_void,
    ) -> *mut c_char;
    fn tch_extension_tvm_ffi_free(object: *mut c_void);
    fn tch_extension_tvm_ffi_metadata(
        module: *mut c_void,
        name: *const c_char,
        len: usize,
        text: *mut *mut c_char,
    ) -> *mut c_char;
    fn tch_extension_tvm_ffi_call(
        function: *mut c_void,
        values: *const RawValue,
        len: usize,
        without_grad: bool,
        is_disjoint: bool,
        tensor: *mut *mut C_tensor,
        results: *mut *mut CResults,
        error: *mut TvmFfiCallError,
    ) -> *mut c_char;
}

/// Where libtvm_ffi is in this process.
pub(crate) enum Presence {
    /// Its symbols are global. Calls are possible if the version is one that this crate knows.
    Global([u32; 3]),
    /// The library at this path is loaded, and other libraries do not find its symbols.
    Local(String),
    Absent,
}

/// Attaches to libtvm_ffi if it is in this process.
pub(crate) fn attach() -> Result<Presence> {
    let (mut version, mut path) = ([0; 3], null_mut());
    // SAFETY: there is room for three numbers, and we own the path.
    let message = unsafe { tch_extension_tvm_ffi_attach(version.as_mut_ptr(), &mut path) };
    match (take_message(message), take_message(path)) {
        (Some(message), _) => Err(Error::Torch(message)),
        (None, Some(path)) => Ok(Presence::Local(path)),
        (None, None) if version == [0; 3] => Ok(Presence::Absent),
        (None, None) => Ok(Presence::Global(version)),
    }
}

/// Restores the handler of SIGSEGV when it is dropped. The lock keeps a second thread from saving the
/// handler that the first thread's library has just installed.
pub(crate) struct Handler {
    handler: *mut c_void,
    _alone: MutexGuard<'static, ()>,
}

impl Handler {
    pub fn keep() -> Handler {
        static ALONE: Mutex<()> = Mutex::new(());
        let _alone = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Handler { handler: tch_extension_tvm_ffi_keep_handler(), _alone }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        // SAFETY: C++ made the pointer for us, and nobody uses it afterwards.
        unsafe { tch_extension_tvm_ffi_restore_handler(self.handler) }
    }
}

/// A module, which stays until the process ends.
pub(crate) struct Module(NonNull<c_void>);

// SAFETY: it is an object of TVM FFI with atomic reference counts, and only functions of TVM FFI read
// it.
unsafe impl Send for Module {}
// SAFETY: as for `Send`.
unsafe impl Sync for Module {}

impl Module {
    /// Makes a module of a loaded library. Also returns the functions that the library exports.
    pub fn load(path: &CStr) -> Result<(Module, Vec<String>)> {
        let (mut module, mut names) = (null_mut(), null_mut());
        // SAFETY: the path is null-terminated. Whoever names a library is responsible for what it does
        // as a module. C++ writes both on success, and we own the names.
        let message = unsafe { tch_extension_tvm_ffi_load(path.as_ptr(), &mut module, &mut names) };
        let names = take_message(names).unwrap_or_default();
        match (take_message(message), NonNull::new(module)) {
            (None, Some(module)) => Ok((Module(module), names.lines().map(String::from).collect())),
            (message, _) => Err(Error::Torch(message.unwrap_or_default())),
        }
    }

    pub fn function(&self, name: &str) -> Result<Option<Function>> {
        let mut function = null_mut();
        // SAFETY: the module is alive, and so is the text during the call. We own the function.
        let message = unsafe {
            let name = (name.as_ptr().cast(), name.len());
            tch_extension_tvm_ffi_function(self.0.as_ptr(), name.0, name.1, &mut function)
        };
        match take_message(message) {
            Some(message) => Err(Error::Torch(message)),
            None => Ok(NonNull::new(function).map(Function)),
        }
    }

    /// What the module says of a function, or nothing.
    pub fn metadata(&self, name: &str) -> Result<Option<String>> {
        // SAFETY: the module is alive, and so is the text during the call. We own the result.
        let found = text(|text| unsafe {
            let name = (name.as_ptr().cast(), name.len());
            tch_extension_tvm_ffi_metadata(self.0.as_ptr(), name.0, name.1, text)
        })?;
        Ok(Some(found).filter(|text| !text.is_empty()))
    }
}

/// Why a call failed.
pub(crate) enum CallFailure {
    Function(String),
    /// The argument with this index cannot be passed; the text describes it.
    Argument(usize, String),
    RequiresGrad,
    /// Memory that is written may be memory of another argument.
    MayOverlap,
    Output(Error),
}

impl TvmFfiCallError {
    #[cold]
    fn explained(&self, message: *mut c_char) -> Box<CallFailure> {
        let message = take_message(message).unwrap_or_default();
        Box::new(match self.kind {
            1 => CallFailure::Argument(usize::try_from(self.argument).unwrap_or_default(), message),
            2 => CallFailure::RequiresGrad,
            3 => CallFailure::MayOverlap,
            _ => CallFailure::Function(message),
        })
    }
}

/// A function of a module.
pub(crate) struct Function(NonNull<c_void>);

// SAFETY: it is an object of TVM FFI with atomic reference counts. A function may be called by any
// thread: Python's other threads and C++ do, too.
unsafe impl Send for Function {}
// SAFETY: as for `Send`.
unsafe impl Sync for Function {}

impl Function {
    /// Calls the function. With `without_grad`, gradients may get lost. With `is_disjoint`, the
    /// caller has checked that outputs overlap neither each other nor inputs. Nothing is returned for `None`.
    #[inline]
    pub fn call(
        &self,
        values: &[Value<'_>],
        without_grad: bool,
        is_disjoint: bool,
    ) -> std::result::Result<Vec<Output>, Box<CallFailure>> {
        let (mut tensor, mut results) = (null_mut(), null_mut());
        let mut error = TvmFfiCallError::default();
        // SAFETY: the function is alive. A `Value` has the layout of a `RawValue`, and what it borrows
        // lives during the call. We own the tensor or the results.
        let message = unsafe {
            tch_extension_tvm_ffi_call(
                self.0.as_ptr(),
                values.as_ptr().cast(),
                values.len(),
                without_grad,
                is_disjoint,
                &mut tensor,
                &mut results,
                &mut error,
            )
        };
        if !message.is_null() {
            return Err(error.explained(message));
        }
        if !tensor.is_null() {
            // SAFETY: it is a handle that C++ allocated for us.
            return Ok(vec![Output::Tensor(unsafe { Tensor::from_ptr(tensor) })]);
        }
        // SAFETY: C++ made them for us, or there are none.
        let results = unsafe { Results::of(results) };
        results.map_or(Ok(Vec::new()), |results| {
            results.read().map_err(|error| Box::new(CallFailure::Output(error)))
        })
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // SAFETY: C++ made the function for us, and nobody uses it afterwards.
        unsafe { tch_extension_tvm_ffi_free(self.0.as_ptr()) }
    }
}
