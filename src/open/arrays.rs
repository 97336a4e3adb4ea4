//! Arguments become checked arrays, numbers and texts. What a kernel relies on is checked here.

use super::abi::{DlDataType, DlDevice, DlTensor, Function, Refusal, Value, stream_of};
use crate::ops::kinds::{Device, Kind};
use std::ffi::c_void;
use std::fmt::Display;

pub type Result<T> = std::result::Result<T, Refusal>;

/// The arguments of a call, as many as the function takes.
pub struct Arguments<'a> {
    function: &'a Function,
    values: Vec<Value<'a>>,
}

/// One of them.
#[derive(Clone, Copy)]
pub struct Argument<'a> {
    op: &'static str,
    name: &'static str,
    value: Value<'a>,
}

impl<'a> Arguments<'a> {
    pub fn of(function: &'a Function, values: impl Iterator<Item = Value<'a>>) -> Result<Self> {
        let values: Vec<Value<'a>> = values.collect();
        let Function { name, arguments, .. } = function;
        if values.len() != arguments.len() {
            let hint = match values.len() < arguments.len() {
                true => "; write None for what is left out",
                false => "",
            };
            let (expected, names) = (arguments.len(), arguments.join(", "));
            let got = values.len();
            let text = format!("{name}: expected {expected} arguments ({names}), got {got}{hint}");
            return Err(Refusal { kind: "TypeError", text });
        }
        Ok(Arguments { function, values })
    }

    /// All arguments, in their order.
    pub fn named<const N: usize>(&self) -> Result<[Argument<'a>; N]> {
        let op = self.function.name;
        let names = self.function.arguments.iter();
        let all = names.zip(&self.values).map(|(&name, &value)| Argument { op, name, value });
        let all: Vec<Argument<'a>> = all.collect();
        all.try_into().map_err(|_| Refusal {
            kind: "RuntimeError",
            text: format!("{op}: internal error: it has another number of arguments"),
        })
    }
}

fn dtype_name(DlDataType { code, bits, lanes }: DlDataType) -> String {
    let name = match code {
        0 => "int",
        1 => "uint",
        2 => "float",
        4 => "bfloat",
        5 => "complex",
        6 => "bool",
        _ => return format!("an array of another dtype (DLPack's code {code})"),
    };
    let lanes = if lanes == 1 { String::new() } else { format!(" in vectors of {lanes}") };
    if code == 6 { format!("bool{lanes}") } else { format!("{name}{bits}{lanes}") }
}

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        Kind::Float => "float32",
        Kind::Double => "float64",
    }
}

fn kind_of(dtype: DlDataType) -> Option<Kind> {
    match (dtype.code, dtype.bits, dtype.lanes) {
        (2, 16, 1) => Some(Kind::Half),
        (4, 16, 1) => Some(Kind::BFloat16),
        (2, 32, 1) => Some(Kind::Float),
        (2, 64, 1) => Some(Kind::Double),
        _ => None,
    }
}

pub const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Such as "float32, float16 or bfloat16".
fn names(kinds: &[Kind]) -> String {
    let (last, others) = kinds.split_last().unwrap_or((&Kind::Float, &[]));
    // What is of the array's kind or wide may be named twice.
    let others = others.iter().filter(|kind| *kind != last);
    let others: Vec<&str> = others.copied().map(kind_name).collect();
    let others = if others.is_empty() { String::new() } else { others.join(", ") + " or " };
    others + kind_name(*last)
}

/// DLPack's numbers of devices.
const CPU: i32 = 1;
const CUDA: i32 = 2;

fn device_of(DlDevice { kind, index }: DlDevice) -> Device {
    match (kind, usize::try_from(index)) {
        (CPU, _) => Device::Cpu,
        (CUDA, Ok(index)) => Device::Cuda(index),
        _ => Device::Other,
    }
}

fn device_name(device: DlDevice) -> String {
    match device.kind {
        CPU => "the CPU".to_string(),
        CUDA => format!("CUDA device {}", device.index),
        kind => format!("a device of DLPack's type {kind}"),
    }
}

impl<'a> Argument<'a> {
    pub fn is_none(&self) -> bool {
        matches!(self.value, Value::None)
    }

    /// The error for this argument.
    pub fn refuse(
        &self,
        kind: &'static str,
        expected: impl Display,
        got: impl Display,
        way_out: &str,
    ) -> Refusal {
        let way_out = if way_out.is_empty() { String::new() } else { format!("; {way_out}") };
        let (op, name) = (self.op, self.name);
        Refusal { kind, text: format!("{op}: {name}: expected {expected}, got {got}{way_out}") }
    }

    fn type_error(&self, expected: &str) -> Refusal {
        let got = match self.value {
            Value::None => "None".to_string(),
            Value::Int(number) => format!("the integer {number}"),
            Value::Bool(flag) => format!("the bool {flag}"),
            Value::Float(number) => format!("the number {number}"),
            Value::DataType(_) => "a dtype".to_string(),
            Value::Device(_) => "a device".to_string(),
            Value::Array(_) => "an array".to_string(),
            Value::Text(text) => format!("the text {:?}", String::from_utf8_lossy(text)),
            // As tvm/ffi/c_api.h numbers them.
            Value::Other(index) => match index {
                67 => "an error".to_string(),
                68 => "a function or a Python object".to_string(),
                69 => "a shape".to_string(),
                71 | 75 => "a list".to_string(),
                72 | 76 => "a dict".to_string(),
                74 => "a Python object".to_string(),
                index => format!("a value of TVM FFI's type {index}"),
            },
        };
        self.refuse("TypeError", expected, got, "")
    }

    fn array(&self) -> Result<Array<'a>> {
        match self.value {
            Value::Array(tensor) => Array::new(*self, tensor),
            _ => Err(self.type_error("an array")),
        }
    }

    pub fn integer(&self, at_least: i64) -> Result<i64> {
        match self.value {
            Value::Int(number) if number >= at_least => Ok(number),
            Value::Int(number) => {
                Err(self.refuse("ValueError", format!("at least {at_least}"), number, ""))
            }
            _ => Err(self.type_error("an integer")),
        }
    }

    /// A number from 0 to `most`.
    pub fn number(&self, most: f64) -> Result<f64> {
        let number = match self.value {
            Value::Float(number) => number,
            Value::Int(number) => number as f64,
            _ => return Err(self.type_error("a number")),
        };
        if (0.0..=most).contains(&number) {
            return Ok(number);
        }
        let expected = match most {
            f64::MAX => "a finite number, at least 0".to_string(),
            most => format!("a number from 0 to {most}"),
        };
        Err(self.refuse("ValueError", expected, number, ""))
    }

    /// A bool, or 0 or 1, which callers have who know no bool.
    pub fn flag(&self) -> Result<bool> {
        match self.value {
            Value::Bool(flag) => Ok(flag),
            Value::Int(number @ (0 | 1)) => Ok(number == 1),
            _ => Err(self.type_error("a bool")),
        }
    }

    /// The index of the text that was passed, or the index itself.
    pub fn one_of(&self, texts: &[&str]) -> Result<usize> {
        let found = match self.value {
            Value::Text(text) => texts.iter().position(|known| known.as_bytes() == text),
            Value::Int(index) => usize::try_from(index).ok().filter(|index| *index < texts.len()),
            _ => None,
        };
        found.ok_or_else(|| self.type_error(&format!("one of {texts:?}")))
    }

    /// A dtype, or its name.
    pub fn kind(&self) -> Result<Kind> {
        let kind = match self.value {
            Value::DataType(dtype) => kind_of(dtype),
            Value::Text(text) => KINDS.into_iter().find(|kind| kind_name(*kind).as_bytes() == text),
            _ => return Err(self.type_error("a dtype")),
        };
        let got = || match self.value {
            Value::DataType(dtype) => dtype_name(dtype),
            Value::Text(text) => format!("{:?}", String::from_utf8_lossy(text)),
            _ => String::new(),
        };
        kind.ok_or_else(|| self.refuse("TypeError", names(&KINDS), got(), ""))
    }

    pub fn device(&self) -> Result<Device> {
        match self.value {
            Value::Device(device) => self.with_kernels(device),
            _ => Err(self.type_error("a device, such as tvm_ffi.device(\"cuda:0\")")),
        }
    }

    /// A device that this library has kernels for.
    fn with_kernels(&self, device: DlDevice) -> Result<Device> {
        let found = device_of(device);
        if found == Device::Other {
            let expected = "the CPU or an existing CUDA device";
            return Err(self.refuse("ValueError", expected, device_name(device), ""));
        }
        if matches!(found, Device::Cuda(_)) && !cfg!(tch_extension_cuda) {
            let way_out = "build the library with a CUDA toolkit";
            return Err(self.refuse("ValueError", "the CPU", device_name(device), way_out));
        }
        match crate::kernels::CPU_IS_ELSEWHERE {
            Some(way_out) if found == Device::Cpu => {
                Err(self.refuse("ValueError", "a CUDA device", "the CPU", way_out))
            }
            _ => Ok(found),
        }
    }
}

/// An array whose memory, as far as anybody can tell, holds its elements.
#[derive(Clone, Copy)]
pub struct Array<'a> {
    argument: Argument<'a>,
    pub address: *mut c_void,
    pub shape: &'a [i64],
    strides: Option<&'a [i64]>,
    dtype: DlDataType,
    device: DlDevice,
    /// The bytes from its first element to the end of the last one.
    bytes: usize,
}

/// More dimensions than any library has.
const MOST_DIMENSIONS: i32 = 64;

impl<'a> Array<'a> {
    fn new(argument: Argument<'a>, tensor: &'a DlTensor) -> Result<Self> {
        let refuse = |expected: &str, got: &dyn Display| {
            argument.refuse("ValueError", expected, got, "copy it")
        };
        let &DlTensor { data, device, ndim, dtype, shape, strides, byte_offset } = tensor;
        let has_shape = (0..=MOST_DIMENSIONS).contains(&ndim) && (ndim == 0 || !shape.is_null());
        if !has_shape {
            return Err(refuse("at most 64 dimensions and their sizes", &format!("{ndim}")));
        }
        // SAFETY: an array has so many sizes and, unless they are null, strides.
        let sizes = |at: *const i64| unsafe { std::slice::from_raw_parts(at, ndim as usize) };
        let shape = if ndim == 0 { &[] } else { sizes(shape) };
        let strides = (ndim > 0 && !strides.is_null()).then(|| sizes(strides));
        if let Some(&size) = shape.iter().find(|size| **size < 0) {
            return Err(refuse("sizes of at least 0", &size));
        }
        let all = Array { argument, address: data, shape, strides, dtype, device, bytes: 0 };
        let is_backward = |(size, stride): (&i64, &i64)| *size > 1 && *stride < 0;
        if strides.is_some_and(|strides| shape.iter().zip(strides).any(is_backward)) {
            return Err(refuse("strides of at least 0, as a copy has", &format!("{strides:?}")));
        }
        let too_large = || refuse("an array that fits into memory", &format!("{shape:?}"));
        let bytes = all.extent().ok_or_else(too_large)?;
        if bytes > 0 && data.is_null() {
            return Err(refuse("memory for the elements", &"a null pointer"));
        }
        let offset = usize::try_from(byte_offset).map_err(|_| too_large())?;
        let first = data.addr().checked_add(offset).ok_or_else(too_large)?;
        first.checked_add(bytes).ok_or_else(too_large)?;
        let element = usize::from(dtype.bits.div_ceil(8)).max(1);
        if bytes > 0 && matches!(element, 2 | 4 | 8) && first % element != 0 {
            let expected = format!("an address that is a multiple of {element} bytes");
            return Err(refuse(&expected, &format!("{first:#x}")));
        }
        Ok(Array { address: data.wrapping_byte_add(offset), bytes, ..all })
    }

    /// The bytes that it takes, with gaps; `None` if they cannot be.
    fn extent(&self) -> Option<usize> {
        let element = i64::from(self.dtype.bits).checked_mul(self.dtype.lanes.into())?;
        let element = element.checked_add(7)? / 8;
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut elements: i64 = 1;
        for size in self.shape {
            elements = elements.checked_mul(*size)?;
        }
        let mut last = elements - 1;
        if let Some(strides) = self.strides {
            last = 0;
            for (size, stride) in self.shape.iter().zip(strides) {
                let stride = if *size > 1 { *stride } else { 0 };
                last = (size - 1).checked_mul(stride)?.checked_add(last)?;
            }
        }
        elements.checked_mul(element)?;
        let bytes = last.checked_add(1)?.checked_mul(element)?;
        isize::try_from(bytes).ok().map(isize::cast_unsigned)
    }

    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    fn is_contiguous(&self) -> bool {
        let Some(strides) = self.strides.filter(|_| !self.is_empty()) else { return true };
        let mut expected = 1;
        for (size, stride) in self.shape.iter().zip(strides).rev() {
            if *size > 1 && *stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    pub fn refuse(&self, expected: impl Display, got: impl Display, way_out: &str) -> Refusal {
        self.argument.refuse("ValueError", expected, got, way_out)
    }

    pub fn contiguous(self) -> Result<Self> {
        if self.is_contiguous() {
            return Ok(self);
        }
        let got = format!("strides {:?} of a shape {:?}", self.strides.unwrap_or(&[]), self.shape);
        Err(self.refuse("a contiguous array", got, "copy it, as numpy.ascontiguousarray does"))
    }

    pub fn is_of(&self, code: u8, bits: u8) -> bool {
        self.dtype == DlDataType { code, bits, lanes: 1 }
    }

    pub fn of_shape(self, shape: &[i64]) -> Result<Self> {
        if self.shape == shape {
            return Ok(self);
        }
        Err(self.refuse(format!("shape {shape:?}"), format!("{:?}", self.shape), ""))
    }

    pub fn one_of(self, kinds: &[Kind]) -> Result<Of<'a>> {
        match kind_of(self.dtype).filter(|kind| kinds.contains(kind)) {
            Some(kind) => Ok(Of { array: self, kind }),
            None => Err(self.wrong_type(&names(kinds))),
        }
    }

    pub fn wrong_type(&self, expected: &str) -> Refusal {
        self.argument.refuse("TypeError", expected, dtype_name(self.dtype), "")
    }

    /// The strides of a row-major array, or its own.
    pub fn strides(&self) -> Vec<i64> {
        if let Some(strides) = self.strides {
            return strides.to_vec();
        }
        let mut strides = vec![1; self.shape.len()];
        for at in (1..self.shape.len()).rev() {
            strides[at - 1] = self.shape[at].max(1).saturating_mul(strides[at]);
        }
        strides
    }

    /// Its values, if it is on the CPU and contiguous.
    ///
    /// # Safety
    /// It has 64-bit integers, `len` of them.
    pub unsafe fn integers(&self, len: i64) -> impl Iterator<Item = i64> + 'a {
        let first = self.address.cast::<i64>().cast_const();
        // SAFETY: what the caller guarantees (see `# Safety`); its memory was checked.
        (0..len.max(0) as usize).map(move |at| unsafe { first.add(at).read() })
    }
}

/// An array of a kind with kernels.
#[derive(Clone, Copy)]
pub struct Of<'a> {
    pub array: Array<'a>,
    pub kind: Kind,
}

impl<'a> Of<'a> {
    /// The sizes but the last one, and the numbers of rows and columns.
    pub fn rows(&self) -> Result<(&'a [i64], [i64; 2])> {
        let shape = self.array.shape;
        let expected = "at least one dimension, and columns in the last one";
        let refuse = || self.array.refuse(expected, format!("shape {shape:?}"), "");
        let (columns, leading) =
            shape.split_last().filter(|(last, _)| **last > 0).ok_or_else(refuse)?;
        let rows = leading.iter().try_fold(1_i64, |rows, size| rows.checked_mul(*size));
        let sizes = rows.map(|rows| [rows, *columns]).filter(|sizes| can_be_planned(*sizes));
        let too_many =
            || self.array.refuse("fewer rows or columns", format!("shape {shape:?}"), "");
        Ok((leading, sizes.ok_or_else(too_many)?))
    }
}

/// Whether plans can compute with these numbers of rows and columns. Without rows, there may be more columns
/// than fit into memory.
pub fn can_be_planned([rows, columns]: [i64; 2]) -> bool {
    rows.max(1).checked_mul(columns).is_some_and(|elements| elements < i64::MAX / 64)
}

/// The addresses that kernels get for arrays that may be absent.
pub fn address(of: Option<Of<'_>>) -> *mut c_void {
    of.map_or(std::ptr::null_mut(), |of| of.array.address)
}

/// The arrays of a call, on one device.
pub struct Call<'a> {
    op: &'static str,
    on: DlDevice,
    /// The name of the array that says the device.
    first: &'static str,
    pub device: Device,
    all: Vec<(Array<'a>, bool)>,
}

impl<'a> Call<'a> {
    /// A call on the device of this array, which is read, and has one of four kinds.
    pub fn of(argument: Argument<'a>) -> Result<(Self, Of<'a>)> {
        let (mut call, array) = Call::of_strided(argument)?;
        call.all.push((array.array.contiguous()?, false));
        Ok((call, array))
    }

    /// The same for an array with any strides, which is not yet among those of the call.
    pub fn of_strided(argument: Argument<'a>) -> Result<(Self, Of<'a>)> {
        let array = argument.array()?;
        let device = argument.with_kernels(array.device)?;
        let (op, on, first) = (argument.op, array.device, argument.name);
        let call = Call { op, on, first, device, all: Vec::with_capacity(10) };
        Ok((call, array.one_of(&KINDS)?))
    }

    fn take(&mut self, argument: Argument<'a>, is_written: bool) -> Result<Array<'a>> {
        let array = argument.array()?;
        if device_of(array.device) != self.device {
            let expected = format!("{}, as {}", device_name(self.on), self.first);
            return Err(array.refuse(expected, device_name(array.device), "move it there"));
        }
        self.all.push((array, is_written));
        Ok(array)
    }

    /// An array that is read, of any type and in any strides.
    pub fn strided(&mut self, argument: Argument<'a>) -> Result<Array<'a>> {
        self.take(argument, false)
    }

    pub fn read(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Of<'a>> {
        self.take(argument, false)?.contiguous()?.of_shape(shape)?.one_of(kinds)
    }

    pub fn written(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Of<'a>> {
        self.take(argument, true)?.contiguous()?.of_shape(shape)?.one_of(kinds)
    }

    /// `None` for None.
    pub fn may_read(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Option<Of<'a>>> {
        (!argument.is_none()).then(|| self.read(argument, shape, kinds)).transpose()
    }

    /// `None` for None.
    pub fn may_be_written(
        &mut self,
        argument: Argument<'a>,
        shape: &[i64],
        kinds: &[Kind],
    ) -> Result<Option<Of<'a>>> {
        (!argument.is_none()).then(|| self.written(argument, shape, kinds)).transpose()
    }

    /// A number for each row, or one number: `[]` or `[1]`.
    pub fn number(
        &mut self,
        argument: Argument<'a>,
        is_written: bool,
        kinds: &[Kind],
    ) -> Result<Of<'a>> {
        let array = self.take(argument, is_written)?;
        if !matches!(array.shape, [] | [1]) {
            return Err(array.refuse("shape [] or [1]", format!("{:?}", array.shape), ""));
        }
        array.one_of(kinds)
    }

    /// Scratch, if it is there, for [`Workspace::take`].
    pub fn workspace(&mut self, argument: Argument<'a>) -> Result<Workspace<'a>> {
        let array = match argument.is_none() {
            true => None,
            false => Some(self.take(argument, true)?.contiguous()?),
        };
        Ok(Workspace { argument, array, used: 0 })
    }

    /// Refuses arrays that are written and share memory with others.
    pub fn check_overlaps(&self) -> Result<()> {
        for (at, (array, is_written)) in self.all.iter().enumerate() {
            for (other, other_is_written) in &self.all[..at] {
                let is_apart = array.bytes == 0
                    || other.bytes == 0
                    || array.address.addr() + array.bytes <= other.address.addr()
                    || other.address.addr() + other.bytes <= array.address.addr();
                if is_apart || !is_written && !other_is_written {
                    continue;
                }
                let (one, other) = match is_written {
                    true => (array, other),
                    false => (other, array),
                };
                let expected = "memory of its own, because it is written";
                let got = format!("some of {}'s", other.argument.name);
                return Err(one.refuse(expected, got, "pass an array that was made for it"));
            }
        }
        Ok(())
    }

    /// Calls kernels, on a GPU with the stream that the caller has set.
    pub fn run(&self, kernels: impl FnOnce() -> crate::Result<()>) -> Result<()> {
        Ok(match self.device {
            Device::Cpu => kernels(),
            device => crate::cuda::on_stream(self.op, device.into(), stream_of(self.on)?, kernels),
        }?)
    }
}

/// Scratch that kernels share out.
pub struct Workspace<'a> {
    argument: Argument<'a>,
    array: Option<Array<'a>>,
    used: usize,
}

/// Each piece of scratch begins at a multiple of this many bytes.
const PIECE: usize = 256;

/// How large a workspace has to be for pieces of so many bytes each.
pub fn workspace_bytes(op: &'static str, pieces: &[Option<i64>]) -> Result<i64> {
    let mut all = Some(PIECE - 1);
    for piece in pieces {
        let bytes = piece.and_then(|bytes| usize::try_from(bytes).ok());
        let whole = bytes.and_then(|bytes| bytes.checked_next_multiple_of(PIECE));
        all = all.zip(whole).and_then(|(all, piece)| all.checked_add(piece));
    }
    let all = all.and_then(|bytes| i64::try_from(bytes).ok());
    let text = format!("{op}: expected sizes of arrays that fit into memory, got larger ones");
    all.ok_or(Refusal { kind: "ValueError", text })
}

impl Workspace<'_> {
    /// A piece of so many bytes.
    pub fn take(&mut self, bytes: Option<i64>, gives_size: &str) -> Result<*mut c_void> {
        let start = self.array.map_or(0, |array| array.address.addr()) + self.used;
        let end = start
            .checked_next_multiple_of(PIECE)
            .zip(bytes.and_then(|it| usize::try_from(it).ok()));
        let end = end.and_then(|(first, bytes)| first.checked_add(bytes));
        let (Some(array), Some(end)) = (self.array, end) else {
            return Err(self.too_small(gives_size));
        };
        let used = end - array.address.addr();
        if used > array.bytes {
            return Err(self.too_small(gives_size));
        }
        self.used = used;
        Ok(array.address.wrapping_byte_add(used - bytes.unwrap_or(0) as usize))
    }

    fn too_small(&self, gives_size: &str) -> Refusal {
        let got =
            self.array.map_or_else(|| "None".to_string(), |array| format!("{} bytes", array.bytes));
        let way_out = format!("{gives_size} says how many bytes it needs");
        self.argument.refuse("ValueError", "a larger array of scratch", got, &way_out)
    }
}
