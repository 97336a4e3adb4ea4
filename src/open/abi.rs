//! TVM FFI's C ABI: arguments, results, errors and streams. The functions of libtvm_ffi are looked up in the
//! process, because whoever calls has loaded it.

use super::Answer;
use super::arguments::Arguments;
use crate::Error;
use std::any::Any as Panic;
use std::ffi::{CStr, CString, c_char, c_void};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;

/// `DLDevice` of DLPack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDevice {
    pub kind: i32,
    pub index: i32,
}

/// `DLDataType` of DLPack.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DlDataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

/// `DLTensor` of DLPack.
#[repr(C)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device: DlDevice,
    pub ndim: i32,
    pub dtype: DlDataType,
    pub shape: *const i64,
    /// Null if the array is contiguous.
    pub strides: *const i64,
    pub byte_offset: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
union Payload {
    integer: i64,
    real: f64,
    pointer: *const c_void,
    text: [u8; 8],
    dtype: DlDataType,
    device: DlDevice,
}

/// `TVMFFIAny`: an argument or a result.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Any {
    type_index: i32,
    /// Of a small string.
    len: u32,
    payload: Payload,
}

/// `TVMFFIObject`, the head of an object.
#[repr(C)]
struct Object {
    counts: u64,
    type_index: i32,
    padding: u32,
    deleter: *const c_void,
}

/// What a string has after its head.
#[repr(C)]
struct Bytes {
    data: *const u8,
    size: usize,
}

const INT: i32 = 1;

/// An argument, read.
#[derive(Clone, Copy)]
pub enum Value<'a> {
    None,
    Int(i64),
    Bool(bool),
    Float(f64),
    DataType(DlDataType),
    Device(DlDevice),
    Array(&'a DlTensor),
    Text(&'a [u8]),
    /// Of a type that no function here takes.
    Other(i32),
}

impl Value<'_> {
    /// # Safety
    /// The value keeps to the ABI, and what it points to lives as long as it.
    unsafe fn of(any: &Any) -> Value<'_> {
        let Any { type_index, len, payload } = any;
        // SAFETY: the type says which field is there, and what a pointer points to (see `# Safety`).
        unsafe {
            let object = payload.pointer;
            let content = || object.cast::<Object>().add(1);
            match type_index {
                0 => Value::None,
                &INT => Value::Int(payload.integer),
                2 => Value::Bool(payload.integer != 0),
                3 => Value::Float(payload.real),
                5 => Value::DataType(payload.dtype),
                6 => Value::Device(payload.device),
                7 | 8 | 65 | 70 if object.is_null() => Value::None,
                7 => Value::Array(&*object.cast()),
                70 => Value::Array(&*content().cast()),
                8 => Value::Text(CStr::from_ptr(object.cast()).to_bytes()),
                11 => Value::Text(&payload.text[..(*len as usize).min(payload.text.len())]),
                65 => {
                    let Bytes { data, size } = &*content().cast::<Bytes>();
                    let is_empty = data.is_null() || *size == 0;
                    let text =
                        if is_empty { &[] } else { std::slice::from_raw_parts(*data, *size) };
                    Value::Text(text)
                }
                &other => Value::Other(other),
            }
        }
    }
}

/// Why a call failed: the name of a Python exception, and one line.
#[derive(Debug)]
pub struct Refusal {
    pub kind: &'static str,
    pub text: String,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal { kind: "RuntimeError", text: error.to_string() }
    }
}

/// A function, its name and those of its arguments.
#[derive(Clone, Copy)]
pub struct Function {
    pub(super) name: &'static str,
    pub(super) arguments: &'static [&'static str],
    pub(super) body: fn(&Arguments<'_>) -> Answer,
}

/// Calls a function. An error or a panic becomes TVM FFI's error; then the result is not 0.
///
/// # Safety
/// There are `count` arguments, which keep to the ABI, and arrays describe memory that exists. `result` may be
/// written.
pub unsafe fn run(function: &Function, arguments: *const Any, count: i32, result: *mut Any) -> i32 {
    let call = || {
        let count = usize::try_from(count).ok().filter(|count| *count == 0 || !arguments.is_null());
        let arguments = count.map(|count| match count {
            0 => &[],
            // SAFETY: what the caller guarantees (see `# Safety`).
            count => unsafe { std::slice::from_raw_parts(arguments, count) },
        });
        // SAFETY: as above.
        let values = arguments.unwrap_or_default().iter().map(|any| unsafe { Value::of(any) });
        let values = Arguments::of(function, values)?;
        (function.body)(&values)
    };
    let refusal = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(None)) => return 0,
        Ok(Ok(Some(integer))) => {
            if !result.is_null() {
                let any = Any { type_index: INT, len: 0, payload: Payload { integer } };
                // SAFETY: the caller lets us write the result.
                unsafe { result.write(any) };
            }
            return 0;
        }
        Ok(Err(refusal)) => refusal,
        Err(panic) => {
            let text = format!("internal error: {}", text_of(&*panic));
            Refusal { kind: "RuntimeError", text }
        }
    };
    raise(function.name, refusal);
    -1
}

fn text_of(panic: &(dyn Panic + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic")
}

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// A function of libtvm_ffi, or null. Null stands for all libraries of the process, as `RTLD_DEFAULT` does.
fn of_tvm_ffi(name: &CStr) -> *mut c_void {
    // SAFETY: the name is null-terminated.
    unsafe { dlsym(null_mut(), name.as_ptr()) }
}

/// Leaves an error for the caller, which names the function.
fn raise(function: &str, Refusal { kind, text }: Refusal) {
    type Raise = unsafe extern "C" fn(*const c_char, *const c_char);
    let is_named = text.split_once(':').is_some_and(|(name, _)| name == function);
    let text = if is_named { text } else { format!("{function}: {text}") };
    let of = |text: &str| CString::new(text.replace(['\0', '\n'], " ")).unwrap_or_default();
    let (kind, text) = (of(kind), of(&text));
    // SAFETY: this is the function's type, which libtvm_ffi declares; null becomes `None`.
    let raise = unsafe {
        std::mem::transmute::<*mut c_void, Option<Raise>>(of_tvm_ffi(
            c"TVMFFIErrorSetRaisedFromCStr",
        ))
    };
    match raise {
        // SAFETY: both texts are null-terminated and live during the call.
        Some(raise) => unsafe { raise(kind.as_ptr(), text.as_ptr()) },
        // The caller cannot ask for a text that libtvm_ffi does not keep.
        None => {
            let (kind, text) = (kind.to_string_lossy(), text.to_string_lossy());
            // Not eprintln, which panics where stderr is closed.
            _ = writeln!(std::io::stderr(), "{kind}: {text}");
        }
    }
}

/// The stream that the caller has set for a device, or null, the default one.
///
/// # Errors
/// If nobody can have set one, because libtvm_ffi is not among the libraries that all see: kernels on the
/// default stream would not wait for the caller's.
pub fn stream_of(device: DlDevice) -> Result<*mut c_void, Refusal> {
    type Get = unsafe extern "C" fn(i32, i32) -> *mut c_void;
    // SAFETY: this is the function's type, which libtvm_ffi declares; null becomes `None`.
    let get = unsafe {
        std::mem::transmute::<*mut c_void, Option<Get>>(of_tvm_ffi(c"TVMFFIEnvGetStream"))
    };
    let text = "the stream is unknown: expected libtvm_ffi, loaded with RTLD_GLOBAL, got none";
    let get = get.ok_or_else(|| Refusal { kind: "RuntimeError", text: text.to_string() })?;
    // SAFETY: any numbers may be passed.
    Ok(unsafe { get(device.kind, device.index) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A panic must not leave through the C function. No libtvm_ffi keeps its text here.
    #[test]
    fn a_panic_is_an_error_of_the_call() {
        fn panics(_: &Arguments<'_>) -> Answer {
            panic!("in the body")
        }
        fn counts(of: &Arguments<'_>) -> Answer {
            let [number] = of.named()?;
            number.integer(0).map(Some)
        }
        let run = |body, value| {
            let function = Function { name: "f", arguments: &["number"], body };
            let any = |integer| Any { type_index: INT, len: 0, payload: Payload { integer } };
            let (argument, mut result) = (any(value), any(7));
            // SAFETY: there is one argument, a number, and room for the result.
            let status = unsafe { super::run(&function, &argument, 1, &mut result) };
            // SAFETY: the result is a number, before and after.
            (status, unsafe { result.payload.integer })
        };
        assert_eq!(run(panics, 5), (-1, 7));
        assert_eq!(run(counts, 5), (0, 5));
        assert_eq!(run(counts, -5), (-1, 7));
    }
}
