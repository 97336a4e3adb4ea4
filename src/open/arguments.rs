//! Arguments become numbers, texts, kinds and devices, and errors name them.

use super::abi::{DlDataType, DlDevice, Function, Refusal, Value};
use super::arrays::Array;
use crate::ops::kinds::{Device, Kind};
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
    pub(super) op: &'static str,
    pub(super) name: &'static str,
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

pub(super) fn dtype_name(DlDataType { code, bits, lanes }: DlDataType) -> String {
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

pub(super) fn kind_of(dtype: DlDataType) -> Option<Kind> {
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
pub(super) fn names(kinds: &[Kind]) -> String {
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

pub(super) fn device_of(DlDevice { kind, index }: DlDevice) -> Device {
    match (kind, usize::try_from(index)) {
        (CPU, _) => Device::Cpu,
        (CUDA, Ok(index)) => Device::Cuda(index),
        _ => Device::Other,
    }
}

pub(super) fn device_name(device: DlDevice) -> String {
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

    pub(super) fn array(&self) -> Result<Array<'a>> {
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
    pub(super) fn with_kernels(&self, device: DlDevice) -> Result<Device> {
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
