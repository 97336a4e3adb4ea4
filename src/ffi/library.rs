//! Bindings to `csrc/library/dispatcher.cpp`.

use super::value::{RawValue, Tag, device_code, read, slice};
use super::{take_message, text};
use crate::{Error, Result};
use std::ffi::{CString, c_char};
use std::ptr::NonNull;
use tch::{Device, Tensor};
use torch_sys::C_tensor;

pub(crate) use super::value::Value;
pub use super::value::{Layout, MemoryFormat, Output};

#[repr(C)]
#[doc(alias = "tch_extension::Operator")]
struct COperator {
    _opaque: [u8; 0],
}

#[repr(C)]
#[doc(alias = "tch_extension::Results")]
pub(super) struct CResults {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Default)]
struct CallError {
    kind: i32,
    argument: i32,
}

unsafe extern "C" {
    fn tch_extension_find_operator(
        name: *const c_char,
        overload: *const c_char,
        result: *mut *mut COperator,
    ) -> *mut c_char;
    fn tch_extension_free_operator(op: *mut COperator);
    fn tch_extension_operator_schema(op: *const COperator, text: *mut *mut c_char) -> *mut c_char;
    fn tch_extension_operator_arguments(
        op: *const COperator,
        text: *mut *mut c_char,
    ) -> *mut c_char;
    fn tch_extension_operator_backends(op: *const COperator, text: *mut *mut c_char)
    -> *mut c_char;
    fn tch_extension_operator_defaults(
        op: *const COperator,
        result: *mut *mut CResults,
    ) -> *mut c_char;
    fn tch_extension_operator_names(names: *mut *mut c_char) -> *mut c_char;
    fn tch_extension_operator_autograd(
        op: *const COperator,
        device_type: i32,
        result: *mut i32,
    ) -> *mut c_char;
    fn tch_extension_call(
        op: *const COperator,
        values: *const RawValue,
        len: usize,
        without_grad: bool,
        checks_autograd: bool,
        result: *mut *mut CResults,
        error: *mut CallError,
    ) -> *mut c_char;
    fn tch_extension_keep_arguments(
        op: *const COperator,
        values: *const RawValue,
        len: usize,
        result: *mut *mut CResults,
    ) -> *mut c_char;
    fn tch_extension_results(results: *const CResults, len: *mut usize) -> *const RawValue;
    fn tch_extension_free_results(results: *mut CResults);
    fn tch_extension_is_same_tensor(one: *const C_tensor, other: *const C_tensor) -> bool;
}

/// The results of a call, which C++ keeps until they are read.
pub(super) struct Results(NonNull<CResults>);

impl Results {
    fn values(&self) -> &[RawValue] {
        let mut len = 0;
        // SAFETY: the results are alive, and their values live as long as they do.
        unsafe {
            let values = tch_extension_results(self.0.as_ptr(), &mut len);
            slice(values.cast(), len)
        }
    }

    /// # Safety
    /// C++ made the results for us, or there are none.
    #[cfg(feature = "tvm_ffi")]
    pub unsafe fn of(results: *mut CResults) -> Option<Results> {
        NonNull::new(results).map(Results)
    }

    pub fn read(&self) -> Result<Vec<Output>> {
        // SAFETY: the data that the values point to lives as long as the results.
        self.values().iter().map(|value| unsafe { read(value) }).collect()
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        // SAFETY: C++ made the results for us, and nobody uses them afterwards.
        unsafe { tch_extension_free_results(self.0.as_ptr()) }
    }
}

/// The arguments of a call that are not tensors, kept for its backward pass.
pub(crate) struct Arguments(Results);

// SAFETY: they are numbers, texts and lists of them, which nobody changes once they are made. Any
// thread may free them.
unsafe impl Send for Arguments {}
// SAFETY: as for `Send`.
unsafe impl Sync for Arguments {}

impl Arguments {
    /// # Safety
    /// `kept` must be results that C++ made for us and that nobody else uses.
    pub(super) unsafe fn new(kept: NonNull<CResults>) -> Self {
        Arguments(Results(kept))
    }

    /// The argument at this index of the schema; `None` for a tensor, and for a value that Rust
    /// cannot read.
    pub fn get(&self, index: usize) -> Result<Option<Output>> {
        let kept = self.0.values().get(index).filter(|value| value.tag != Tag::Default);
        // SAFETY: the data that the value points to lives as long as the results.
        kept.map(|value| unsafe { read(value) }).transpose()
    }
}

/// Why a call failed.
pub(crate) enum CallFailure {
    /// An error of the operator itself, or of libtorch.
    Operator(String),
    /// The argument with this index does not fit the schema; the text describes what was passed.
    Argument(usize, String),
    /// An input requires grad, but no gradient would reach it.
    NoBackward,
    /// The same, for a composite operator, noticed only after it had run.
    LostGraph,
    /// A result that tch has no type for.
    Output(Error),
}

/// How a call treats grad mode.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Grad {
    /// Grad mode stays as it is, and the call checks that there will be a gradient.
    Checked,
    /// Grad mode is off.
    Off,
}

/// A registered operator that was found.
pub(crate) struct Operator(NonNull<COperator>);

// SAFETY: it is a handle of an operator that the dispatcher keeps forever, and C++ only reads it.
unsafe impl Send for Operator {}
// SAFETY: as for `Send`.
unsafe impl Sync for Operator {}

impl Operator {
    pub fn find(name: &str, overload: &str) -> Result<Option<Self>> {
        let (Ok(name), Ok(overload)) = (CString::new(name), CString::new(overload)) else {
            return Ok(None);
        };
        let mut result = std::ptr::null_mut();
        // SAFETY: both texts are null-terminated and live during the call. We own the handle.
        let message =
            unsafe { tch_extension_find_operator(name.as_ptr(), overload.as_ptr(), &mut result) };
        match take_message(message) {
            Some(message) => Err(Error::Torch(message)),
            None => Ok(NonNull::new(result).map(Operator)),
        }
    }

    pub fn schema(&self) -> Result<String> {
        // SAFETY: the handle is alive.
        text(|text| unsafe { tch_extension_operator_schema(self.0.as_ptr(), text) })
    }

    /// One line for each argument; see `arguments_text` in C++.
    pub fn arguments(&self) -> Result<String> {
        // SAFETY: the handle is alive.
        text(|text| unsafe { tch_extension_operator_arguments(self.0.as_ptr(), text) })
    }

    /// The default value of each argument that has one.
    pub fn defaults(&self) -> Result<Vec<Option<Output>>> {
        let mut result = std::ptr::null_mut();
        // SAFETY: the handle is alive. We own the result.
        let message = unsafe { tch_extension_operator_defaults(self.0.as_ptr(), &mut result) };
        let Some(result) = NonNull::new(result).map(Results) else {
            return Err(Error::Torch(take_message(message).unwrap_or_default()));
        };
        let read = |value: &RawValue| {
            // SAFETY: the data that the value points to lives as long as the results.
            (value.tag != Tag::Default).then(|| unsafe { read(value) }).transpose()
        };
        result.values().iter().map(read).collect()
    }

    /// The backends for which the operator has its own kernel, named as in the dispatcher, one per
    /// line.
    pub fn backends(&self) -> Result<String> {
        // SAFETY: the handle is alive.
        text(|text| unsafe { tch_extension_operator_backends(self.0.as_ptr(), text) })
    }

    pub fn has_autograd(&self, device: Device) -> Result<bool> {
        let mut result = 0;
        let (kind, _) = device_code(device);
        // SAFETY: the handle is alive.
        let message =
            unsafe { tch_extension_operator_autograd(self.0.as_ptr(), kind as i32, &mut result) };
        take_message(message).map_or(Ok(result != 0), |message| Err(Error::Torch(message)))
    }

    /// Calls the operator with one value for each of its arguments.
    pub fn call(
        &self,
        values: &[Value<'_>],
        grad: Grad,
    ) -> std::result::Result<Vec<Output>, CallFailure> {
        let (mut results, mut error) = (std::ptr::null_mut(), CallError::default());
        // SAFETY: the handle is alive. A `Value` has the layout of a `RawValue`, and what it
        // borrows lives during the call. C++ reads one value for each argument. We own the results.
        let message = unsafe {
            tch_extension_call(
                self.0.as_ptr(),
                values.as_ptr().cast(),
                values.len(),
                grad == Grad::Off,
                grad == Grad::Checked,
                &mut results,
                &mut error,
            )
        };
        if let Some(message) = take_message(message) {
            return Err(match error.kind {
                1 => CallFailure::Argument(
                    usize::try_from(error.argument).unwrap_or_default(),
                    message,
                ),
                2 => CallFailure::NoBackward,
                3 => CallFailure::LostGraph,
                _ => CallFailure::Operator(message),
            });
        }
        let results = NonNull::new(results).map(Results);
        results.map_or(Ok(Vec::new()), |results| results.read().map_err(CallFailure::Output))
    }

    /// Keeps the arguments that a backward pass can ask for, after a call has run.
    pub fn keep_arguments(&self, values: &[Value<'_>]) -> Result<Arguments> {
        let mut kept = std::ptr::null_mut();
        // SAFETY: as in `call`.
        let message = unsafe {
            tch_extension_keep_arguments(
                self.0.as_ptr(),
                values.as_ptr().cast(),
                values.len(),
                &mut kept,
            )
        };
        match (take_message(message), NonNull::new(kept)) {
            (None, Some(kept)) => Ok(Arguments(Results(kept))),
            (message, _) => Err(Error::Torch(message.unwrap_or_default())),
        }
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        // SAFETY: C++ made the operator for us, and nobody uses it afterwards.
        unsafe { tch_extension_free_operator(self.0.as_ptr()) }
    }
}

/// The names of all operators, one per line.
pub(crate) fn operator_names() -> Result<String> {
    // SAFETY: C++ writes `names` on success, and we own the text.
    text(|names| unsafe { tch_extension_operator_names(names) })
}

/// Whether both are handles of the same tensor.
pub(crate) fn is_same(one: &Tensor, other: &Tensor) -> bool {
    // SAFETY: both pointers are borrowed from live tensors.
    unsafe { tch_extension_is_same_tensor(one.as_ptr(), other.as_ptr()) }
}
