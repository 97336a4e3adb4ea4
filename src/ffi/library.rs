//! `csrc/library`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::{CString, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::NonNull;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

#[repr(C)]
struct COperator {
    _opaque: [u8; 0],
}

#[repr(C)]
struct CResults {
    _opaque: [u8; 0],
}

/// `csrc/library/value.h`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq)]
enum Tag {
    Default,
    None,
    Tensor,
    Int,
    Float,
    Bool,
    String,
    Device,
    ScalarType,
    Layout,
    MemoryFormat,
    List,
    Ints,
    Floats,
}

#[repr(C)]
#[derive(Clone, Copy)]
union Payload {
    integer: i64,
    real: f64,
    data: *const c_void,
}

#[repr(C)]
struct RawValue {
    tag: Tag,
    payload: Payload,
    len: usize,
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
    fn tch_extension_operator_arguments(op: *const COperator, text: *mut *mut c_char) -> *mut c_char;
    fn tch_extension_operator_backends(op: *const COperator, text: *mut *mut c_char) -> *mut c_char;
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
    #[cfg(test)]
    safe fn tch_extension_value_layout() -> *const usize;
}

/// How a tensor's elements are kept: libtorch's `Layout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Layout {
    Strided,
    Sparse,
    SparseCsr,
    Mkldnn,
    SparseCsc,
    SparseBsr,
    SparseBsc,
    Jagged,
}

/// The order of dimensions in memory: libtorch's `MemoryFormat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum MemoryFormat {
    Contiguous,
    Preserve,
    ChannelsLast,
    ChannelsLast3d,
}

const LAYOUTS: [Layout; 8] = [
    Layout::Strided,
    Layout::Sparse,
    Layout::SparseCsr,
    Layout::Mkldnn,
    Layout::SparseCsc,
    Layout::SparseBsr,
    Layout::SparseBsc,
    Layout::Jagged,
];

const MEMORY_FORMATS: [MemoryFormat; 4] = [
    MemoryFormat::Contiguous,
    MemoryFormat::Preserve,
    MemoryFormat::ChannelsLast,
    MemoryFormat::ChannelsLast3d,
];

/// libtorch's numbers of its `ScalarType`s.
const KINDS: [(Kind, i64); 20] = [
    (Kind::Uint8, 0),
    (Kind::Int8, 1),
    (Kind::Int16, 2),
    (Kind::Int, 3),
    (Kind::Int64, 4),
    (Kind::Half, 5),
    (Kind::Float, 6),
    (Kind::Double, 7),
    (Kind::ComplexHalf, 8),
    (Kind::ComplexFloat, 9),
    (Kind::ComplexDouble, 10),
    (Kind::Bool, 11),
    (Kind::QInt8, 12),
    (Kind::QUInt8, 13),
    (Kind::QInt32, 14),
    (Kind::BFloat16, 15),
    (Kind::Float8e5m2, 23),
    (Kind::Float8e4m3fn, 24),
    (Kind::Float8e5m2fnuz, 25),
    (Kind::Float8e4m3fnuz, 26),
];

/// libtorch's number of the device's type, and its index.
fn device_code(device: Device) -> (usize, i64) {
    match device {
        Device::Cpu => (0, -1),
        Device::Cuda(index) => (1, i64::try_from(index).unwrap_or(i64::MAX)),
        Device::Vulkan => (10, -1),
        Device::Mps => (13, -1),
    }
}

fn device_of((kind, index): (usize, i64)) -> Result<Device> {
    match kind {
        0 => Ok(Device::Cpu),
        1 => Ok(Device::Cuda(usize::try_from(index).unwrap_or_default())),
        10 => Ok(Device::Vulkan),
        13 => Ok(Device::Mps),
        other => Err(Error::msg(format!("it returned a device that tch has not: libtorch's number {other}"))),
    }
}

/// An argument, as C++ reads it. A list is owned, anything else borrowed for `'a`.
#[repr(transparent)]
pub(crate) struct Value<'a> {
    raw: RawValue,
    _borrowed: PhantomData<&'a Tensor>,
}

impl<'a> Value<'a> {
    fn new(tag: Tag, payload: Payload, len: usize) -> Self {
        Value { raw: RawValue { tag, payload, len }, _borrowed: PhantomData }
    }

    fn number(tag: Tag, integer: i64) -> Self {
        Value::new(tag, Payload { integer }, 0)
    }

    pub fn default_of_the_schema() -> Self {
        Value::number(Tag::Default, 0)
    }

    pub fn none() -> Self {
        Value::number(Tag::None, 0)
    }

    pub fn tensor(tensor: &'a Tensor) -> Self {
        Value::new(Tag::Tensor, Payload { data: tensor.as_ptr().cast() }, 0)
    }

    pub fn int(integer: i64) -> Self {
        Value::number(Tag::Int, integer)
    }

    pub fn float(real: f64) -> Self {
        Value::new(Tag::Float, Payload { real }, 0)
    }

    pub fn bool(value: bool) -> Self {
        Value::number(Tag::Bool, value.into())
    }

    pub fn string(text: &'a str) -> Self {
        Value::new(Tag::String, Payload { data: text.as_ptr().cast() }, text.len())
    }

    pub fn device(device: Device) -> Self {
        let (kind, integer) = device_code(device);
        Value::new(Tag::Device, Payload { integer }, kind)
    }

    pub fn kind(kind: Kind) -> Self {
        let code = KINDS.iter().find(|(known, _)| *known == kind).map(|(_, code)| *code);
        Value::number(Tag::ScalarType, code.unwrap_or(-1))
    }

    pub fn layout(layout: Layout) -> Self {
        Value::number(Tag::Layout, layout as i64)
    }

    pub fn memory_format(format: MemoryFormat) -> Self {
        Value::number(Tag::MemoryFormat, format as i64)
    }

    pub fn ints(values: &'a [i64]) -> Self {
        Value::new(Tag::Ints, Payload { data: values.as_ptr().cast() }, values.len())
    }

    pub fn floats(values: &'a [f64]) -> Self {
        Value::new(Tag::Floats, Payload { data: values.as_ptr().cast() }, values.len())
    }

    pub fn list(values: Vec<Value<'a>>) -> Self {
        let len = values.len();
        let data = Box::into_raw(values.into_boxed_slice()).cast::<Value<'a>>().cast_const().cast();
        Value::new(Tag::List, Payload { data }, len)
    }

    fn items(&self) -> &[Value<'a>] {
        if self.raw.tag != Tag::List {
            return &[];
        }
        // SAFETY: `list` made the tag from a boxed slice of this length, which lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.raw.payload.data.cast(), self.raw.len) }
    }

    /// New handles of the tensors in it, in order.
    pub fn tensors(&self, into: &mut Vec<Tensor>) {
        if self.raw.tag == Tag::Tensor {
            // SAFETY: the tag says which member was written; borrowed from a tensor that lives for `'a`, of which a
            // new handle is made.
            into.push(unsafe { Tensor::clone_from_ptr(self.raw.payload.data.cast_mut().cast()) });
        }
        self.items().iter().for_each(|item| item.tensors(into));
    }
}

impl Drop for Value<'_> {
    fn drop(&mut self) {
        if self.raw.tag == Tag::List {
            // SAFETY: `list` made it from a boxed slice of this length, and nothing uses it afterwards.
            drop(unsafe {
                Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                    self.raw.payload.data.cast_mut().cast::<Value<'_>>(),
                    self.raw.len,
                ))
            });
        }
    }
}

/// What an operator returned.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Output {
    /// Nothing, or an undefined tensor.
    None,
    Tensor(Tensor),
    Int(i64),
    Float(f64),
    Bool(bool),
    String(String),
    Device(Device),
    Kind(Kind),
    Layout(Layout),
    MemoryFormat(MemoryFormat),
    List(Vec<Output>),
}

/// # Safety
/// The value must come from `from_ivalue` in C++, and what it is borrowed from must live.
unsafe fn read(value: &RawValue) -> Result<Output> {
    let unknown =
        |what: &str, code: i64| Error::msg(format!("it returned {what} number {code}, which tch has not"));
    // SAFETY: the tag says which member was written; pointers are valid as the caller promises.
    unsafe {
        let (payload, len) = (value.payload, value.len);
        Ok(match value.tag {
            Tag::Default | Tag::None | Tag::Ints | Tag::Floats => Output::None,
            Tag::Tensor => Output::Tensor(Tensor::clone_from_ptr(payload.data.cast_mut().cast())),
            Tag::Int => Output::Int(payload.integer),
            Tag::Float => Output::Float(payload.real),
            Tag::Bool => Output::Bool(payload.integer != 0),
            Tag::String => {
                let text = std::str::from_utf8(slice::<u8>(payload.data, len));
                let text =
                    text.map_err(|error| Error::msg(format!("it returned a str that is no text: {error}")));
                Output::String(text?.to_string())
            }
            Tag::Device => Output::Device(device_of((len, payload.integer))?),
            Tag::ScalarType => {
                let known = KINDS.iter().find(|(_, code)| *code == payload.integer);
                Output::Kind(known.ok_or_else(|| unknown("the kind", payload.integer))?.0)
            }
            Tag::Layout => {
                let known = usize::try_from(payload.integer).ok().and_then(|index| LAYOUTS.get(index));
                Output::Layout(*known.ok_or_else(|| unknown("the layout", payload.integer))?)
            }
            Tag::MemoryFormat => {
                let known = usize::try_from(payload.integer).ok().and_then(|index| MEMORY_FORMATS.get(index));
                Output::MemoryFormat(*known.ok_or_else(|| unknown("the memory format", payload.integer))?)
            }
            Tag::List => {
                let items = slice::<RawValue>(payload.data, len);
                Output::List(items.iter().map(|item| read(item)).collect::<Result<_>>()?)
            }
        })
    }
}

/// # Safety
/// `data` must point to `len` values that live for `'a`, or `len` be 0.
unsafe fn slice<'a, T>(data: *const c_void, len: usize) -> &'a [T] {
    match len {
        // `from_raw_parts` takes no null, which an empty C++ vector may give.
        0 => &[],
        // SAFETY: as the caller promises.
        _ => unsafe { std::slice::from_raw_parts(data.cast(), len) },
    }
}

/// What C++ keeps of a call until its results are read.
struct Results(NonNull<CResults>);

impl Results {
    fn values(&self) -> &[RawValue] {
        let mut len = 0;
        // SAFETY: the results are alive, and their values live as long.
        unsafe {
            let values = tch_extension_results(self.0.as_ptr(), &mut len);
            slice(values.cast(), len)
        }
    }

    fn read(&self) -> Result<Vec<Output>> {
        // SAFETY: what the values point to lives as long as the results.
        self.values().iter().map(|value| unsafe { read(value) }).collect()
    }
}

impl Drop for Results {
    fn drop(&mut self) {
        // SAFETY: C++ made them for us, and nothing uses them afterwards.
        unsafe { tch_extension_free_results(self.0.as_ptr()) }
    }
}

/// The arguments of a call that are no tensors, for its backward.
pub(crate) struct Arguments(Results);

// SAFETY: numbers, texts and lists of them, which nobody changes once they are made; any thread may free them.
unsafe impl Send for Arguments {}
// SAFETY: as above.
unsafe impl Sync for Arguments {}

impl Arguments {
    /// The argument in this place of the schema; `None` for a tensor, or what cannot be read in Rust.
    pub fn get(&self, index: usize) -> Result<Option<Output>> {
        let kept = self.0.values().get(index).filter(|value| value.tag != Tag::Default);
        // SAFETY: what the value points to lives as long as the results.
        kept.map(|value| unsafe { read(value) }).transpose()
    }
}

/// Why a call failed.
pub(crate) enum CallFailure {
    /// The operator's own error, or libtorch's.
    Operator(String),
    /// This argument is not what the schema says; the text is what came.
    Argument(usize, String),
    /// An input requires grad, and no gradient would reach it.
    NoBackward,
    /// The same, of an operator made of others, found out when it had run.
    LostGraph,
    /// A result that tch has no type for.
    Output(Error),
}

/// How a call treats the graph.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Grad {
    /// As it is, after a look at whether there will be a gradient.
    Checked,
    /// Off.
    Off,
}

/// A resolved operator.
pub(crate) struct Operator(NonNull<COperator>);

// SAFETY: a handle of what the dispatcher keeps for ever; C++ only reads it.
unsafe impl Send for Operator {}
// SAFETY: as above.
unsafe impl Sync for Operator {}

impl Operator {
    pub fn find(name: &str, overload: &str) -> Result<Option<Self>> {
        let (Ok(name), Ok(overload)) = (CString::new(name), CString::new(overload)) else { return Ok(None) };
        let mut result = std::ptr::null_mut();
        // SAFETY: both texts are terminated and live during the call; the handle becomes ours.
        let message = unsafe { tch_extension_find_operator(name.as_ptr(), overload.as_ptr(), &mut result) };
        match take_message(message) {
            Some(message) => Err(Error::Torch(message)),
            None => Ok(NonNull::new(result).map(Operator)),
        }
    }

    pub fn schema(&self) -> Result<String> {
        // SAFETY: the handle is alive.
        text(|text| unsafe { tch_extension_operator_schema(self.0.as_ptr(), text) })
    }

    /// A line for each argument: `arguments_text` in C++.
    pub fn arguments(&self) -> Result<String> {
        // SAFETY: the handle is alive.
        text(|text| unsafe { tch_extension_operator_arguments(self.0.as_ptr(), text) })
    }

    /// The backends that have a kernel of its own, as the dispatcher names them, one a line.
    pub fn backends(&self) -> Result<String> {
        // SAFETY: the handle is alive.
        text(|text| unsafe { tch_extension_operator_backends(self.0.as_ptr(), text) })
    }

    pub fn has_autograd(&self, device: Device) -> Result<bool> {
        let mut result = 0;
        let (kind, _) = device_code(device);
        // SAFETY: the handle is alive.
        let message = unsafe { tch_extension_operator_autograd(self.0.as_ptr(), kind as i32, &mut result) };
        take_message(message).map_or(Ok(result != 0), |message| Err(Error::Torch(message)))
    }

    /// Calls it, with a value for each of its arguments.
    pub fn call(&self, values: &[Value<'_>], grad: Grad) -> std::result::Result<Vec<Output>, CallFailure> {
        let (mut results, mut error) = (std::ptr::null_mut(), CallError::default());
        // SAFETY: the handle is alive; `Value` is a `RawValue`, and what they borrow lives during the call; C++
        // reads one for each argument; the results become ours.
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
                1 => CallFailure::Argument(usize::try_from(error.argument).unwrap_or_default(), message),
                2 => CallFailure::NoBackward,
                3 => CallFailure::LostGraph,
                _ => CallFailure::Operator(message),
            });
        }
        let results = NonNull::new(results).map(Results);
        results.map_or(Ok(Vec::new()), |results| results.read().map_err(CallFailure::Output))
    }

    /// Keeps what a backward can ask of the values of a call that has run.
    pub fn keep_arguments(&self, values: &[Value<'_>]) -> Result<Arguments> {
        let mut kept = std::ptr::null_mut();
        // SAFETY: as in `call`.
        let message = unsafe {
            tch_extension_keep_arguments(self.0.as_ptr(), values.as_ptr().cast(), values.len(), &mut kept)
        };
        match (take_message(message), NonNull::new(kept)) {
            (None, Some(kept)) => Ok(Arguments(Results(kept))),
            (message, _) => Err(Error::Torch(message.unwrap_or_default())),
        }
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        // SAFETY: C++ made it for us, and nothing uses it afterwards.
        unsafe { tch_extension_free_operator(self.0.as_ptr()) }
    }
}

/// A text that C++ hands over, or its error.
fn text(call: impl FnOnce(*mut *mut c_char) -> *mut c_char) -> Result<String> {
    let mut text = std::ptr::null_mut();
    match take_message(call(&mut text)) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(take_message(text).unwrap_or_default()),
    }
}

/// The names of all operators, one a line.
pub(crate) fn operator_names() -> Result<String> {
    // SAFETY: the text becomes ours.
    text(|names| unsafe { tch_extension_operator_names(names) })
}

/// Whether both are handles of one tensor.
pub(crate) fn is_same(one: &Tensor, other: &Tensor) -> bool {
    // SAFETY: borrowed from live tensors.
    unsafe { tch_extension_is_same_tensor(one.as_ptr(), other.as_ptr()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn both_sides_agree_on_the_layout_of_a_value() {
        // SAFETY: C++'s array of three.
        let theirs = unsafe { std::slice::from_raw_parts(tch_extension_value_layout(), 3) };
        let ours = [size_of::<RawValue>(), offset_of!(RawValue, payload), offset_of!(RawValue, len)];
        assert_eq!(theirs, ours);
        assert_eq!(size_of::<Value<'_>>(), size_of::<RawValue>());
    }

    #[test]
    fn numbers_of_kinds_layouts_and_devices_are_libtorchs() {
        for (kind, code) in KINDS {
            let tensor = Tensor::zeros([0], (Kind::Float, Device::Cpu));
            let op = Operator::find("aten::to", "dtype").unwrap().unwrap();
            let values = [
                Value::tensor(&tensor),
                Value::kind(kind),
                Value::default_of_the_schema(),
                Value::default_of_the_schema(),
                Value::default_of_the_schema(),
            ];
            // Quantized tensors are not made that way.
            if let Ok(outputs) = op.call(&values, Grad::Checked) {
                let [Output::Tensor(tensor)] = &outputs[..] else { panic!("{outputs:?}") };
                assert_eq!(tensor.kind(), kind, "{code}");
            } else {
                assert!((12..15).contains(&code), "{kind:?}");
            }
        }
        for (index, layout) in LAYOUTS.into_iter().enumerate() {
            assert_eq!(layout as usize, index);
        }
        for (index, format) in MEMORY_FORMATS.into_iter().enumerate() {
            assert_eq!(format as usize, index);
        }
        for device in [Device::Cpu, Device::Cuda(3), Device::Mps, Device::Vulkan] {
            assert_eq!(device_of(device_code(device)).unwrap(), device);
        }
    }
}
