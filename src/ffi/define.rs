//! Bindings to `csrc/library/define.cpp`, `arguments.cpp` and `traced.cpp`: operators that Rust
//! defines. `graph.rs` has their calls as part of a graph.

use super::exceptions::failure;
use super::sym_int::SymInt;
use super::value::{Output, RawValue, Tag, Value, device_of, kind_of_number, read, slice};
use super::{exceptions, take_message};
use crate::python::{Exception, translated};
use crate::{Error, Result};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// A call of an operator, while its kernel runs.
#[repr(C)]
#[doc(alias = "tch_extension::KernelFrame")]
pub(super) struct Frame {
    _opaque: [u8; 0],
}

#[doc(alias = "tch_extension::RegistrationsOfBlock")]
type CRegistrations = c_void;

type Entry = unsafe extern "C" fn(kernel: *const c_void, frame: *mut Frame) -> c_int;

unsafe extern "C" {
    safe fn tch_extension_check_version() -> *mut c_char;
    safe fn tch_extension_begin_registrations() -> *mut CRegistrations;
    fn tch_extension_end_registrations(registrations: *mut CRegistrations, keep: bool);
    fn tch_extension_define(
        registrations: *mut CRegistrations,
        namespace: *const c_char,
        schema: *const c_char,
        is_seeded: bool,
        file: *const c_char,
        line: u32,
    ) -> *mut c_char;
    fn tch_extension_implement(
        registrations: *mut CRegistrations,
        namespace: *const c_char,
        qualified: *const c_char,
        name: *const c_char,
        overload: *const c_char,
        key: *const c_char,
        only_for_graphs: bool,
        file: *const c_char,
        line: u32,
        entry: Entry,
        kernel: *const c_void,
    ) -> *mut c_char;
    fn tch_extension_count_changes(
        registrations: *mut CRegistrations,
        namespace: *const c_char,
        qualified: *const c_char,
        name: *const c_char,
        overload: *const c_char,
        file: *const c_char,
        line: u32,
    ) -> *mut c_char;
    fn tch_extension_kernel_error(
        frame: *mut Frame,
        text: *const c_char,
        len: usize,
        exception: i32,
    );
    safe fn tch_extension_python_runs() -> bool;
    safe fn tch_extension_enter_below_autograd() -> *mut c_void;
    fn tch_extension_leave_below_autograd(guard: *mut c_void);
    fn tch_extension_enter_without_key(key: *const c_char, guard: *mut *mut c_void) -> *mut c_char;
    fn tch_extension_leave_without_key(guard: *mut c_void);
    fn tch_extension_is_traced(tensors: *const *const C_tensor, len: usize) -> bool;
    fn tch_extension_arguments_len(frame: *const Frame) -> usize;
    fn tch_extension_argument(frame: *const Frame, index: usize, value: *mut RawValue);
    fn tch_extension_argument_name(frame: *const Frame, index: usize) -> *const c_char;
    fn tch_extension_argument_type(frame: *const Frame, index: usize) -> *mut c_char;
    fn tch_extension_element(list: *const RawValue, index: usize, value: *mut RawValue);
    fn tch_extension_all_arguments(frame: *mut Frame, values: *mut RawValue) -> *mut c_char;
    fn tch_extension_drop_arguments(frame: *mut Frame);
    fn tch_extension_give_tensor(frame: *mut Frame, tensor: *mut C_tensor);
    fn tch_extension_give_tensors(frame: *mut Frame, tensors: *const *mut C_tensor, len: usize);
    fn tch_extension_give(frame: *mut Frame, index: usize, value: *const RawValue) -> *mut c_char;
    fn tch_extension_results_len(frame: *const Frame) -> usize;
}

fn checked(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |message| Err(Error::Torch(message)))
}

/// A text for C++. It is never freed, because libtorch keeps some of them.
fn kept(text: &str) -> Result<&'static CStr> {
    CString::new(text)
        .map(|text| &*Box::leak(text.into_boxed_c_str()))
        .map_err(|_| Error::msg(format!("{text:?} contains a zero byte")))
}

/// An error if another libtorch is loaded than the one that this crate was compiled for.
pub(crate) fn check_version() -> Result<()> {
    checked(tch_extension_check_version())
}

/// Where something was registered, for libtorch's messages.
#[derive(Clone, Copy)]
pub(crate) struct Place<'a> {
    pub file: &'a str,
    pub line: u32,
}

/// Registrations that belong together. They end when this is dropped, unless they are kept.
pub(crate) struct Registrations(*mut c_void);

impl Registrations {
    pub(crate) fn new() -> Self {
        Registrations(tch_extension_begin_registrations())
    }

    /// Lets the registrations last until the process ends.
    pub(crate) fn keep(self) {
        let registrations = ManuallyDrop::new(self);
        // SAFETY: C++ made it for us, and nobody uses it afterwards.
        unsafe { tch_extension_end_registrations(registrations.0, true) }
    }
}

impl Drop for Registrations {
    fn drop(&mut self) {
        // SAFETY: as in `keep`, which does not drop.
        unsafe { tch_extension_end_registrations(self.0, false) }
    }
}

pub(crate) fn define(
    registrations: &Registrations,
    namespace: &str,
    schema: &str,
    is_seeded: bool,
    place: Place<'_>,
) -> Result<()> {
    let (namespace, schema, file) = (kept(namespace)?, kept(schema)?, kept(place.file)?);
    // SAFETY: the registrations are alive. The texts are null-terminated and live forever.
    checked(unsafe {
        tch_extension_define(
            registrations.0,
            namespace.as_ptr(),
            schema.as_ptr(),
            is_seeded,
            file.as_ptr(),
            place.line,
        )
    })
}

/// A kernel that reads its arguments where they lie.
pub(crate) type TypedKernel = fn(&mut Call<'_>) -> Result<()>;

/// A kernel that gets its arguments as a list.
pub(crate) type UntypedKernel = fn(&[Output]) -> Result<Vec<Output>>;

#[derive(Clone, Copy)]
pub(crate) enum Kernel {
    Typed(TypedKernel),
    /// A kernel for the key `Autograd`, which runs only if there is something to differentiate.
    Graph(TypedKernel),
    Untyped(UntypedKernel),
}

/// The texts by which an operator is registered. They live forever.
struct Names {
    namespace: &'static CStr,
    /// `ns::name`, without the overload.
    qualified: &'static CStr,
    /// The name with its overload.
    name: &'static CStr,
    overload: &'static CStr,
    file: &'static CStr,
}

impl Names {
    /// `name` may have an overload: `add.Tensor`.
    fn new(namespace: &str, name: &str, place: Place<'_>) -> Result<Self> {
        let (base, overload) = name.split_once('.').unwrap_or((name, ""));
        Ok(Names {
            namespace: kept(namespace)?,
            qualified: kept(&format!("{namespace}::{base}"))?,
            name: kept(name)?,
            overload: kept(overload)?,
            file: kept(place.file)?,
        })
    }
}

/// `name` may have an overload: `add.Tensor`.
pub(crate) fn implement(
    registrations: &Registrations,
    namespace: &str,
    name: &str,
    key: &str,
    kernel: Kernel,
    place: Place<'_>,
) -> Result<()> {
    let (names, key) = (Names::new(namespace, name, place)?, kept(key)?);
    let (entry, address): (Entry, *const c_void) = match kernel {
        Kernel::Typed(kernel) | Kernel::Graph(kernel) => (run_typed, kernel as *const c_void),
        Kernel::Untyped(kernel) => (run_untyped, kernel as *const c_void),
    };
    // SAFETY: the registrations are alive. The texts are null-terminated and live forever. The entry
    // reads the pointer as the function that it was made of.
    checked(unsafe {
        tch_extension_implement(
            registrations.0,
            names.namespace.as_ptr(),
            names.qualified.as_ptr(),
            names.name.as_ptr(),
            names.overload.as_ptr(),
            key.as_ptr(),
            matches!(kernel, Kernel::Graph(_)),
            names.file.as_ptr(),
            place.line,
            entry,
            address,
        )
    })
}

/// Registers that calls of the operator change what it writes to, for autograd's check of saved
/// tensors.
pub(crate) fn count_changes(
    registrations: &Registrations,
    namespace: &str,
    name: &str,
    place: Place<'_>,
) -> Result<()> {
    let names = Names::new(namespace, name, place)?;
    // SAFETY: the registrations are alive. The texts are null-terminated and live forever.
    checked(unsafe {
        tch_extension_count_changes(
            registrations.0,
            names.namespace.as_ptr(),
            names.qualified.as_ptr(),
            names.name.as_ptr(),
            names.overload.as_ptr(),
            names.file.as_ptr(),
            place.line,
        )
    })
}

/// # Safety
/// `kernel` must be a [`TypedKernel`], and `frame` belong to the C++ frame that calls.
unsafe extern "C" fn run_typed(kernel: *const c_void, frame: *mut Frame) -> c_int {
    // SAFETY: the caller guarantees the type (see `# Safety`).
    let kernel = unsafe { std::mem::transmute::<*const c_void, TypedKernel>(kernel) };
    // SAFETY: as above.
    unsafe { run(frame, kernel) }
}

/// # Safety
/// `kernel` must be an [`UntypedKernel`], and `frame` belong to the C++ frame that calls.
unsafe extern "C" fn run_untyped(kernel: *const c_void, frame: *mut Frame) -> c_int {
    // SAFETY: the caller guarantees the type (see `# Safety`).
    let kernel = unsafe { std::mem::transmute::<*const c_void, UntypedKernel>(kernel) };
    let body = |call: &mut Call<'_>| {
        let results = kernel(&call.all()?)?;
        call.give_all(&results)
    };
    // SAFETY: as above.
    unsafe { run(frame, body) }
}

/// # Safety
/// `frame` must belong to the C++ frame that calls.
unsafe fn run(frame: *mut Frame, body: impl FnOnce(&mut Call<'_>) -> Result<()>) -> c_int {
    let mut exception = Exception::Runtime;
    let error = failure("its kernel", || {
        // SAFETY: the frame is alive (see `# Safety`).
        let len = unsafe { tch_extension_arguments_len(frame) };
        let mut call = Call { frame, len, _borrowed: PhantomData };
        body(&mut call).map_err(|error| {
            if !tch_extension_python_runs() {
                return error;
            }
            // SAFETY: as above.
            let (found, text) = translated(&error, &unsafe { schema_of(frame, len) });
            exception = found;
            Error::msg(text)
        })
    });
    let Some(error) = error else { return 0 };
    // SAFETY: the frame belongs to the caller (see `# Safety`). C++ copies the text.
    unsafe {
        tch_extension_kernel_error(frame, error.as_ptr().cast(), error.len(), exception as i32)
    };
    1
}

/// The names and types of the operator's arguments.
///
/// # Safety
/// `frame` must be alive, and `len` the number of these arguments.
unsafe fn schema_of(frame: *const Frame, len: usize) -> Vec<(String, String)> {
    let argument = |index| {
        // SAFETY: the caller guarantees both (see `# Safety`). The name lives as long as the operator.
        let name = unsafe { CStr::from_ptr(tch_extension_argument_name(frame, index)) };
        // SAFETY: as above; the text is ours.
        let kind = take_message(unsafe { tch_extension_argument_type(frame, index) });
        (name.to_string_lossy().into_owned(), kind.unwrap_or_default())
    };
    (0..len).map(argument).collect()
}

/// A call of an operator: its arguments, and the place for its results.
pub struct Call<'f> {
    frame: *mut Frame,
    /// The number of arguments that lie there; 0 once the results take their place.
    len: usize,
    _borrowed: PhantomData<&'f mut Frame>,
}

/// An argument, or an item of one that is a list, where it lies.
#[derive(Clone, Copy)]
pub struct Argument<'c> {
    raw: RawValue,
    call: &'c Call<'c>,
    index: usize,
}

/// A tensor that belongs to libtorch.
#[repr(transparent)]
pub struct Borrowed<'c> {
    tensor: ManuallyDrop<Tensor>,
    _call: PhantomData<&'c Tensor>,
}

impl std::ops::Deref for Borrowed<'_> {
    type Target = Tensor;

    #[inline]
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// Tensors that belong to libtorch.
pub struct BorrowedList<'c>(Vec<Borrowed<'c>>);

impl std::ops::Deref for BorrowedList<'_> {
    type Target = [Tensor];

    fn deref(&self) -> &[Tensor] {
        // SAFETY: `Borrowed` and `ManuallyDrop` are transparent, so the items are laid out as
        // tensors. Nobody can take a tensor out of a shared slice.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len()) }
    }
}

impl Call<'_> {
    /// The frame, whose arguments are there.
    ///
    /// # Errors
    /// Once the results have taken their place.
    pub(super) fn frame(&self) -> Result<*mut Frame> {
        // SAFETY: the frame is alive.
        if self.len == unsafe { tch_extension_arguments_len(self.frame) } {
            return Ok(self.frame);
        }
        Err(Error::msg("internal error: the call has its results already"))
    }

    /// The frame, ready for results.
    pub(super) fn emptied_frame(&mut self) -> *mut Frame {
        self.drop_arguments();
        self.frame
    }

    #[inline]
    pub(crate) fn argument(&self, index: usize) -> Argument<'_> {
        let mut raw = RawValue::none();
        if index < self.len {
            // SAFETY: the frame is alive, and the argument is there.
            unsafe { tch_extension_argument(self.frame, index, &mut raw) };
        }
        Argument { raw, call: self, index }
    }

    fn name(&self, index: usize) -> String {
        if index >= self.len {
            return format!("argument {index}");
        }
        // SAFETY: the frame is alive, and the argument is there. The text lives as long as the
        // operator.
        let name = unsafe { CStr::from_ptr(tch_extension_argument_name(self.frame, index)) };
        name.to_string_lossy().into_owned()
    }

    /// All arguments, by their types in the schema.
    fn all(&self) -> Result<Vec<Output>> {
        let mut values = vec![RawValue::none(); self.len];
        // SAFETY: the frame is alive, and there is room for each argument.
        checked(unsafe { tch_extension_all_arguments(self.frame, values.as_mut_ptr()) })?;
        // SAFETY: the data that the values point to lives as long as the frame.
        values.iter().map(|value| unsafe { read(value) }).collect()
    }

    fn give_all(&mut self, results: &[Output]) -> Result<()> {
        // SAFETY: the frame is alive.
        let wanted = unsafe { tch_extension_results_len(self.frame) };
        if results.len() != wanted {
            return Err(Error::msg(format!(
                "its kernel returned {} results, and the schema has {wanted}",
                results.len()
            )));
        }
        self.drop_arguments();
        results
            .iter()
            .enumerate()
            .try_for_each(|(index, result)| self.give(index, &Value::of(result)))
    }

    /// Ends the use of the arguments. The results take their place.
    #[inline]
    pub(crate) fn drop_arguments(&mut self) {
        if std::mem::take(&mut self.len) > 0 {
            // SAFETY: the frame is alive, and whatever borrows from the arguments borrows from
            // `self`.
            unsafe { tch_extension_drop_arguments(self.frame) }
        }
    }

    #[inline]
    pub(crate) fn give_tensor(&mut self, tensor: Option<Tensor>) {
        let handle = tensor.map_or(std::ptr::null_mut(), into_handle);
        // SAFETY: the frame is alive, and C++ takes ownership of the handle.
        unsafe { tch_extension_give_tensor(self.frame, handle) }
    }

    pub(crate) fn give_tensors(&mut self, tensors: Vec<Tensor>) {
        let handles: Vec<_> = tensors.into_iter().map(into_handle).collect();
        // SAFETY: the frame is alive, and C++ takes ownership of the handles.
        unsafe { tch_extension_give_tensors(self.frame, handles.as_ptr(), handles.len()) }
    }

    pub(crate) fn give(&mut self, index: usize, value: &Value<'_>) -> Result<()> {
        // SAFETY: the frame is alive, and C++ copies the value.
        checked(unsafe { tch_extension_give(self.frame, index, std::ptr::from_ref(value).cast()) })
    }
}

fn into_handle(tensor: Tensor) -> *mut C_tensor {
    ManuallyDrop::new(tensor).as_mut_ptr()
}

impl<'c> Argument<'c> {
    #[cold]
    fn wrong(&self, wanted: &str) -> Error {
        let name = self.call.name(self.index);
        let got = match self.raw.tag {
            Tag::None | Tag::Default => "None",
            Tag::Tensor | Tag::Written => "a Tensor",
            Tag::Int => "an int",
            Tag::Float => "a float",
            Tag::Bool => "a bool",
            Tag::String => "a str",
            Tag::Device => "a torch.device",
            Tag::ScalarType => "a torch.dtype",
            Tag::Layout => "a torch.layout",
            Tag::MemoryFormat => "a torch.memory_format",
            Tag::SymInt => "a SymInt",
            Tag::List | Tag::Ints | Tag::Floats | Tag::IValues => "a list",
        };
        Error::msg(format!("{name}: expected {wanted}, got {got}"))
    }

    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        self.raw.tag == Tag::None
    }

    #[inline]
    pub(crate) fn tensor(&self) -> Result<Borrowed<'c>> {
        if self.raw.tag != Tag::Tensor {
            return Err(self.wrong("a Tensor"));
        }
        // SAFETY: the tag says which member was written. The handle is libtorch's own, and lives as
        // long as the call's arguments, from which `'c` borrows. It is never freed from here.
        let tensor = unsafe { Tensor::from_ptr(self.raw.payload.data.cast_mut().cast()) };
        Ok(Borrowed { tensor: ManuallyDrop::new(tensor), _call: PhantomData })
    }

    pub(crate) fn tensor_or_none(&self) -> Result<Option<Borrowed<'c>>> {
        if self.is_none() { Ok(None) } else { self.tensor().map(Some) }
    }

    #[inline]
    pub(crate) fn float(&self) -> Result<f64> {
        match self.raw.tag {
            // SAFETY: the tag says which member was written.
            Tag::Float => Ok(unsafe { self.raw.payload.real }),
            // SAFETY: as above.
            Tag::Int => Ok(unsafe { self.raw.payload.integer } as f64),
            _ => Err(self.wrong("a float")),
        }
    }

    #[inline]
    pub(crate) fn bool(&self) -> Result<bool> {
        match self.raw.tag {
            // SAFETY: the tag says which member was written.
            Tag::Bool => Ok(unsafe { self.raw.payload.integer } != 0),
            _ => Err(self.wrong("a bool")),
        }
    }

    /// The int. A symbolic one becomes the number that is traced.
    #[inline]
    pub(crate) fn int(&self) -> Result<i64> {
        match self.raw.tag {
            // SAFETY: the tag says which member was written.
            Tag::Int => Ok(unsafe { self.raw.payload.integer }),
            _ => self.sym_int()?.guard(),
        }
    }

    pub(crate) fn sym_int(&self) -> Result<SymInt> {
        match self.raw.tag {
            // SAFETY: the tag says which member was written.
            Tag::Int => Ok(SymInt::known(unsafe { self.raw.payload.integer })),
            // SAFETY: as above; the argument keeps the node alive.
            Tag::SymInt => Ok(unsafe { SymInt::borrowed(self.raw.payload.data.cast_mut().cast()) }),
            _ => Err(self.wrong("an int")),
        }
    }

    pub(crate) fn str(&self) -> Result<&'c str> {
        if self.raw.tag != Tag::String {
            return Err(self.wrong("a str"));
        }
        // SAFETY: the tag says which member was written, and the text lives as long as the
        // arguments.
        let bytes = unsafe { slice::<u8>(self.raw.payload.data, self.raw.len) };
        std::str::from_utf8(bytes).map_err(|_| self.wrong("a str of valid UTF-8"))
    }

    pub(crate) fn kind(&self) -> Result<Kind> {
        kind_of_number(self.int()?).ok_or_else(|| self.wrong("a dtype that tch knows"))
    }

    pub(crate) fn device(&self) -> Result<Device> {
        if self.raw.tag != Tag::Device {
            return Err(self.wrong("a device"));
        }
        // SAFETY: the tag says which member was written.
        device_of((self.raw.len, unsafe { self.raw.payload.integer }))
            .map_err(|_| self.wrong("a device that tch knows"))
    }

    pub(crate) fn list<T>(
        &self,
        mut item: impl FnMut(Argument<'c>) -> Result<T>,
    ) -> Result<Vec<T>> {
        if self.raw.tag != Tag::IValues {
            return Err(self.wrong("a list"));
        }
        let mut items = Vec::with_capacity(self.raw.len);
        for place in 0..self.raw.len {
            let mut raw = RawValue::none();
            // SAFETY: the list has this item, which lives as long as the arguments.
            unsafe { tch_extension_element(&self.raw, place, &mut raw) };
            items.push(item(Argument { raw, ..*self })?);
        }
        Ok(items)
    }

    pub(crate) fn tensors(&self) -> Result<BorrowedList<'c>> {
        self.list(|item| item.tensor()).map(BorrowedList)
    }
}

/// Runs `f` below autograd, until it returns or panics.
pub(crate) fn below_autograd<T>(f: impl FnOnce() -> T) -> T {
    struct Guard(*mut c_void);
    impl Drop for Guard {
        fn drop(&mut self) {
            // SAFETY: C++ made the guard for us, in this thread, and nobody uses it afterwards.
            unsafe { tch_extension_leave_below_autograd(self.0) }
        }
    }
    let _guard = Guard(tch_extension_enter_below_autograd());
    f()
}

/// Runs `f` without the kernels for this dispatch key.
pub(crate) fn without_key<T>(key: &str, f: impl FnOnce() -> Result<T>) -> Result<T> {
    struct Guard(*mut c_void);
    impl Drop for Guard {
        fn drop(&mut self) {
            // SAFETY: C++ made the guard for us, in this thread, and nobody uses it afterwards.
            unsafe { tch_extension_leave_without_key(self.0) }
        }
    }
    let key = CString::new(key).map_err(|_| Error::msg("a dispatch key contains a zero byte"))?;
    let mut guard = std::ptr::null_mut();
    // SAFETY: the text is null-terminated, and C++ writes the guard only if it succeeds.
    checked(unsafe { tch_extension_enter_without_key(key.as_ptr(), &mut guard) })?;
    let _guard = Guard(guard);
    f()
}

pub(crate) fn is_traced(tensors: &[&Tensor]) -> bool {
    let pointers: Vec<_> = tensors.iter().map(|tensor| tensor.as_ptr()).collect();
    // SAFETY: each pointer is borrowed from a live tensor.
    unsafe { tch_extension_is_traced(pointers.as_ptr(), pointers.len()) }
}

/// Makes an error of libtorch's one of ours, which stands for the same exception.
pub(crate) fn named(name: &str, error: &Error) -> Error {
    Error::Torch(exceptions::named(name, &error.to_string()))
}

/// Calls an `extern "C" fn()` when the program or library is loaded that contains this use.
#[doc(hidden)]
#[macro_export]
macro_rules! tch_extension_when_loaded {
    ($function:path) => {
        // SAFETY: the loader calls each function pointer of this section, with arguments that a
        // function without parameters ignores, after it has initialised what the library depends on.
        #[used]
        #[unsafe(link_section = ".init_array")]
        static WHEN_LOADED: extern "C" fn() = $function;
    };
}

/// Why registrations failed: one line for each.
static REGISTRATION_ERROR: Mutex<Option<CString>> = Mutex::new(None);

fn lock_registration_error() -> MutexGuard<'static, Option<CString>> {
    REGISTRATION_ERROR.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub(crate) fn registration_error() -> Option<String> {
    lock_registration_error().as_ref().map(|text| text.to_string_lossy().into_owned())
}

/// Adds a line to the reasons.
pub(crate) fn note_registration_error(line: &str) {
    let before = registration_error().map_or(String::new(), |text| text + "\n");
    let text = CString::new((before + line).replace('\0', " "));
    // The old text lives on, because C may still read it.
    std::mem::forget(std::mem::replace(&mut *lock_registration_error(), text.ok()));
}

/// For whoever loads a library of operators, such as Python: null, or the text of
/// [`registration_error`]. It lives until the process ends.
#[unsafe(no_mangle)]
pub extern "C" fn tch_extension_registration_error() -> *const c_char {
    lock_registration_error().as_ref().map_or(std::ptr::null(), |text| text.as_ptr())
}
