//! Bindings to `csrc/library/value.h`: the values that Rust and the dispatcher exchange.

use super::sym_int::SymInt;
use crate::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;
use tch::{Device, Kind, Tensor};

#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Tag {
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
    SymInt,
    IValues,
    #[cfg_attr(not(feature = "tvm_ffi"), expect(dead_code))]
    Written,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union Payload {
    pub integer: i64,
    pub real: f64,
    pub data: *const c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
#[doc(alias = "tch_extension::Value")]
pub(super) struct RawValue {
    pub tag: Tag,
    pub payload: Payload,
    pub len: usize,
}

impl RawValue {
    pub fn none() -> Self {
        RawValue { tag: Tag::None, payload: Payload { integer: 0 }, len: 0 }
    }
}

/// The storage layout of a tensor's elements: libtorch's `Layout`.
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

/// libtorch's number of the device type, and the device's index.
pub(super) fn device_code(device: Device) -> (usize, i64) {
    match device {
        Device::Cpu => (0, -1),
        Device::Cuda(index) => (1, i64::try_from(index).unwrap_or(i64::MAX)),
        Device::Vulkan => (10, -1),
        Device::Mps => (13, -1),
    }
}

pub(super) fn device_of((kind, index): (usize, i64)) -> Result<Device> {
    match kind {
        0 => Ok(Device::Cpu),
        1 => Ok(Device::Cuda(usize::try_from(index).unwrap_or_default())),
        10 => Ok(Device::Vulkan),
        13 => Ok(Device::Mps),
        other => Err(Error::msg(format!(
            "it returned a device that tch does not know: libtorch's number {other}"
        ))),
    }
}

/// libtorch's number of the kind; -1 if there is none.
pub(super) fn kind_number(kind: Kind) -> i32 {
    KINDS.iter().find(|(known, _)| *known == kind).map_or(-1, |(_, code)| *code as i32)
}

pub(super) fn kind_of_number(number: i64) -> Option<Kind> {
    KINDS.iter().find(|(_, code)| *code == number).map(|(kind, _)| *kind)
}

/// An argument in the layout that C++ reads. A list is owned; anything else is borrowed for `'a`.
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

    /// A tensor that the function writes to.
    #[cfg(feature = "tvm_ffi")]
    pub fn written(tensor: &'a mut Tensor) -> Self {
        Value::new(Tag::Written, Payload { data: tensor.as_ptr().cast() }, 0)
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
        Value::number(Tag::ScalarType, kind_number(kind).into())
    }

    pub fn sym_int(value: &'a SymInt) -> Self {
        match value.number() {
            Some(number) => Value::int(number),
            None => Value::new(Tag::SymInt, Payload { data: value.node().cast_const().cast() }, 0),
        }
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
        // SAFETY: `list` made this tag, from a boxed slice of this length that lives as long as
        // `self`.
        unsafe { std::slice::from_raw_parts(self.raw.payload.data.cast(), self.raw.len) }
    }

    /// Appends new handles of the tensors in this value, in order.
    pub fn tensors(&self, into: &mut Vec<Tensor>) {
        if matches!(self.raw.tag, Tag::Tensor | Tag::Written) {
            // SAFETY: the tag says which member was written. The pointer is borrowed from a tensor
            // that lives for `'a`, and this makes a new handle of it.
            into.push(unsafe { Tensor::clone_from_ptr(self.raw.payload.data.cast_mut().cast()) });
        }
        self.items().iter().for_each(|item| item.tensors(into));
    }

    /// Appends whether each of these tensors is written to.
    #[cfg(feature = "tvm_ffi")]
    pub fn are_written(&self, into: &mut Vec<bool>) {
        if matches!(self.raw.tag, Tag::Tensor | Tag::Written) {
            into.push(self.raw.tag == Tag::Written);
        }
        self.items().iter().for_each(|item| item.are_written(into));
    }
}

impl<'a> Value<'a> {
    /// The same value, borrowed.
    pub fn of(output: &'a Output) -> Self {
        match output {
            Output::None => Value::none(),
            Output::Tensor(tensor) => Value::tensor(tensor),
            Output::Int(value) => Value::int(*value),
            Output::Float(value) => Value::float(*value),
            Output::Bool(value) => Value::bool(*value),
            Output::String(text) => Value::string(text),
            Output::Device(device) => Value::device(*device),
            Output::Kind(kind) => Value::kind(*kind),
            Output::Layout(layout) => Value::layout(*layout),
            Output::MemoryFormat(format) => Value::memory_format(*format),
            Output::SymInt(value) => Value::sym_int(value),
            Output::List(items) => Value::list(items.iter().map(Value::of).collect()),
        }
    }
}

impl Drop for Value<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.raw.tag == Tag::List {
            self.drop_items();
        }
    }
}

impl Value<'_> {
    fn drop_items(&mut self) {
        // SAFETY: `list` made the pointer from a boxed slice of this length, and nobody uses it
        // afterwards.
        drop(unsafe {
            Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                self.raw.payload.data.cast_mut().cast::<Value<'_>>(),
                self.raw.len,
            ))
        });
    }
}

/// A value that an operator returned.
#[derive(Debug)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum Output {
    /// No value, or an undefined tensor.
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
    /// An int that is not known while the call is traced.
    SymInt(SymInt),
    List(Vec<Output>),
}

/// # Safety
/// The value must come from `from_ivalue` in C++, and the data that it borrows must be alive.
pub(super) unsafe fn read(value: &RawValue) -> Result<Output> {
    let unknown = |what: &str, code: i64| {
        Error::msg(format!("it returned {what} number {code}, which tch does not know"))
    };
    // SAFETY: the tag says which member was written, and the caller guarantees the pointers (see `#
    // Safety`).
    unsafe {
        let (payload, len) = (value.payload, value.len);
        Ok(match value.tag {
            Tag::Default | Tag::None | Tag::Ints | Tag::Floats | Tag::IValues | Tag::Written => {
                Output::None
            }
            Tag::SymInt => Output::SymInt(SymInt::borrowed(payload.data.cast_mut().cast())),
            Tag::Tensor => Output::Tensor(Tensor::clone_from_ptr(payload.data.cast_mut().cast())),
            Tag::Int => Output::Int(payload.integer),
            Tag::Float => Output::Float(payload.real),
            Tag::Bool => Output::Bool(payload.integer != 0),
            Tag::String => {
                let text = std::str::from_utf8(slice::<u8>(payload.data, len));
                let text = text.map_err(|error| {
                    Error::msg(format!("it returned a str that is not valid UTF-8: {error}"))
                });
                Output::String(text?.to_string())
            }
            Tag::Device => Output::Device(device_of((len, payload.integer))?),
            Tag::ScalarType => {
                let known = kind_of_number(payload.integer);
                Output::Kind(known.ok_or_else(|| unknown("the kind", payload.integer))?)
            }
            Tag::Layout => {
                let known =
                    usize::try_from(payload.integer).ok().and_then(|index| LAYOUTS.get(index));
                Output::Layout(*known.ok_or_else(|| unknown("the layout", payload.integer))?)
            }
            Tag::MemoryFormat => {
                let known = usize::try_from(payload.integer)
                    .ok()
                    .and_then(|index| MEMORY_FORMATS.get(index));
                Output::MemoryFormat(
                    *known.ok_or_else(|| unknown("the memory format", payload.integer))?,
                )
            }
            Tag::List => {
                let items = slice::<RawValue>(payload.data, len);
                Output::List(items.iter().map(|item| read(item)).collect::<Result<_>>()?)
            }
        })
    }
}

/// # Safety
/// `data` must point to `len` values that live for `'a`, or `len` must be 0.
pub(super) unsafe fn slice<'a, T>(data: *const c_void, len: usize) -> &'a [T] {
    match len {
        // `from_raw_parts` must not get a null pointer, which an empty C++ vector may hold.
        0 => &[],
        // SAFETY: the caller guarantees `len` values (see `# Safety`).
        _ => unsafe { std::slice::from_raw_parts(data.cast(), len) },
    }
}

#[cfg(test)]
unsafe extern "C" {
    safe fn tch_extension_value_layout() -> *const usize;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::library::{Grad, Operator};
    use std::mem::{offset_of, size_of};

    #[test]
    fn both_sides_agree_on_the_layout_of_a_value() {
        // SAFETY: C++ returns an array of three numbers.
        let theirs = unsafe { std::slice::from_raw_parts(tch_extension_value_layout(), 3) };
        let ours =
            [size_of::<RawValue>(), offset_of!(RawValue, payload), offset_of!(RawValue, len)];
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
            // Quantized tensors cannot be made this way.
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
