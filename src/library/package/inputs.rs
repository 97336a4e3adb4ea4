//! What a model was compiled for, and whether tensors are that. Compiled code reads memory without
//! asking, so a tensor that is not as expected must be found here.

use super::expression::{Expression, Symbols};
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::tensor::is_in_memory;
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};

/// The inputs of a model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Inputs {
    pub inputs: Vec<Input>,
    pub ranges: BTreeMap<String, Range>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Input {
    /// Its name in the exported program; may be empty.
    pub name: String,
    pub kind: Kind,
    pub device: DeviceType,
    pub sizes: Vec<Size>,
    /// `None` for row-major without gaps.
    pub strides: Option<Vec<Size>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DeviceType {
    Cpu,
    Cuda,
}

/// A size or a stride: a number, or an expression that depends on symbols.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Size {
    text: String,
    pub expression: Expression,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Range {
    pub least: i64,
    /// `None` without a bound.
    pub most: Option<i64>,
}

/// torch's names of kinds.
const KINDS: [(&str, Kind); 16] = [
    ("uint8", Kind::Uint8),
    ("int8", Kind::Int8),
    ("int16", Kind::Int16),
    ("int32", Kind::Int),
    ("int64", Kind::Int64),
    ("float16", Kind::Half),
    ("float32", Kind::Float),
    ("float64", Kind::Double),
    ("complex32", Kind::ComplexHalf),
    ("complex64", Kind::ComplexFloat),
    ("complex128", Kind::ComplexDouble),
    ("bool", Kind::Bool),
    ("bfloat16", Kind::BFloat16),
    ("float8_e5m2", Kind::Float8e5m2),
    ("float8_e4m3fn", Kind::Float8e4m3fn),
    ("float8_e4m3fnuz", Kind::Float8e4m3fnuz),
];

/// The kind that torch calls by this name, such as `float32`.
pub(super) fn kind(name: &str) -> Option<Kind> {
    KINDS.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind)
}

impl DeviceType {
    pub fn named(name: &str) -> Option<DeviceType> {
        match name.split(':').next() {
            Some("cpu") => Some(DeviceType::Cpu),
            Some("cuda") => Some(DeviceType::Cuda),
            _ => None,
        }
    }
}

impl Size {
    pub fn number(number: i64) -> Size {
        Size { text: number.to_string(), expression: Expression::Number(number) }
    }

    pub fn symbol(name: &str) -> Size {
        Size { text: name.to_string(), expression: Expression::Symbol(name.to_string()) }
    }

    fn read(value: &Value) -> std::result::Result<Size, String> {
        if let Some(number) = value.as_i64() {
            return Ok(Size::number(number));
        }
        let text = value.as_str().ok_or_else(|| format!("{value} is no size"))?;
        Ok(Size { text: text.to_string(), expression: Expression::read(text)? })
    }
}

impl Inputs {
    /// Reads a description of inputs; see [`PackageOptions::inputs`](super::PackageOptions::inputs).
    /// `device` is that of inputs that name none.
    pub fn read(text: &str, device: DeviceType) -> std::result::Result<Inputs, String> {
        let whole: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let list =
            whole.get("inputs").and_then(Value::as_array).ok_or("it has no list `inputs`")?;
        let mut inputs = Vec::new();
        for (index, value) in list.iter().enumerate() {
            let input = input(value, device).map_err(|why| format!("input {index}: {why}"))?;
            inputs.push(input);
        }
        let mut ranges = BTreeMap::new();
        for (name, bounds) in whole.get("ranges").and_then(Value::as_object).into_iter().flatten() {
            let bound = |index| bounds.get(index).and_then(Value::as_i64);
            ranges.insert(name.clone(), Range { least: bound(0).unwrap_or(0), most: bound(1) });
        }
        let inputs = Inputs { inputs, ranges };
        inputs.unsolvable().map_or(Ok(inputs), Err)
    }

    /// Why tensors could not be checked, if some symbol is no size of an input by itself.
    fn unsolvable(&self) -> Option<String> {
        let sizes = || self.inputs.iter().flat_map(|input| &input.sizes);
        let strides = self.inputs.iter().flat_map(|input| input.strides.iter().flatten());
        let mut used = Vec::new();
        sizes().chain(strides).for_each(|size| size.expression.symbols(&mut used));
        let is_free = |symbol: &&&str| {
            let defines = |size: &Size| size.expression == Expression::Symbol(symbol.to_string());
            !sizes().any(defines)
        };
        let free = used.iter().find(is_free)?;
        Some(format!("no input has the size {free} by itself, so the others cannot be checked"))
    }

    /// How an input is named in messages.
    fn name(&self, index: usize) -> String {
        match self.inputs.get(index).map(|input| input.name.as_str()) {
            None | Some("") => format!("input {index}"),
            Some(name) => format!("input {index} ({name})"),
        }
    }

    /// Checks everything that the compiled code relies on. `package` names it in messages, and
    /// `device` is where it runs.
    pub fn check(&self, package: &str, device: Device, tensors: &[&Tensor]) -> Result<()> {
        if tensors.len() != self.inputs.len() {
            let names = self.inputs.iter().map(|input| input.name.as_str());
            let names: Vec<&str> = names.filter(|name| !name.is_empty()).collect();
            let names =
                if names.is_empty() { names.join("") } else { format!(": {}", names.join(", ")) };
            return Err(Error::argument(
                package,
                "inputs",
                format!("{} tensors{names}", self.inputs.len()),
                tensors.len().to_string(),
                "",
            ));
        }
        for (index, (input, tensor)) in self.inputs.iter().zip(tensors).enumerate() {
            let refuse = |expected: String, got: String, hint: &str| {
                Err(Error::argument(package, &self.name(index), expected, got, hint))
            };
            if !tensor.defined() {
                return refuse("a tensor".into(), "none".into(), "");
            }
            let wanted = match (input.device, device) {
                (DeviceType::Cuda, Device::Cuda(_)) => device,
                (DeviceType::Cuda, _) => Device::Cuda(0),
                (DeviceType::Cpu, _) => Device::Cpu,
            };
            if tensor.device() != wanted {
                let hint = "the package was compiled for this device; move the tensor by to_device";
                return refuse(format!("{wanted:?}"), format!("{:?}", tensor.device()), hint);
            }
            match tensor.f_kind() {
                Ok(kind) if kind == input.kind => {}
                Ok(kind) => {
                    let hint = "cast it with to_kind";
                    return refuse(format!("kind {:?}", input.kind), format!("{kind:?}"), hint);
                }
                Err(_) => {
                    let got = "a kind that tch does not know".to_string();
                    return refuse(format!("kind {:?}", input.kind), got, "");
                }
            }
            if tensor.dim() != input.sizes.len() {
                let got = format!("{:?}", tensor.size());
                return refuse(format!("the shape {}", list(&input.sizes)), got, "");
            }
            if !is_in_memory(tensor) {
                let got = "a sparse or lazily conjugated one".to_string();
                return refuse("a tensor whose values are in memory".into(), got, "");
            }
            if tensor.requires_grad() && tch_extension_grad_mode() {
                return refuse(
                    "a constant, because compiled code has no backward pass".into(),
                    "one that requires grad".into(),
                    "detach it, or run within tch::no_grad",
                );
            }
        }
        let symbols = self.solve(package, tensors)?;
        for (index, (input, tensor)) in self.inputs.iter().zip(tensors).enumerate() {
            self.check_layout(package, index, input, tensor, &symbols)?;
        }
        Ok(())
    }

    /// The values of the symbols. Each is the size of a dimension somewhere; the first one counts.
    fn solve(&self, package: &str, tensors: &[&Tensor]) -> Result<Symbols> {
        let mut symbols = Symbols::new();
        for (index, (input, tensor)) in self.inputs.iter().zip(tensors).enumerate() {
            for (dim, (size, got)) in input.sizes.iter().zip(tensor.size()).enumerate() {
                let Expression::Symbol(name) = &size.expression else { continue };
                if symbols.contains_key(name) {
                    continue;
                }
                symbols.insert(name.clone(), got);
                let Some(range) = self.ranges.get(name) else { continue };
                if got < range.least || range.most.is_some_and(|most| got > most) {
                    let most =
                        range.most.map_or(String::new(), |most| format!(" and at most {most}"));
                    return Err(Error::argument(
                        package,
                        &self.name(index),
                        format!("size at least {}{most} in dimension {dim}", range.least),
                        format!("{:?}", tensor.size()),
                        "the package was compiled for these sizes",
                    ));
                }
            }
        }
        Ok(symbols)
    }

    fn check_layout(
        &self,
        package: &str,
        index: usize,
        input: &Input,
        tensor: &Tensor,
        symbols: &Symbols,
    ) -> Result<()> {
        let refuse = |expected: String, got: String, hint: &str| {
            Err(Error::argument(package, &self.name(index), expected, got, hint))
        };
        let sizes = tensor.size();
        for (dim, (size, got)) in input.sizes.iter().zip(&sizes).enumerate() {
            if size.expression.value(symbols) != Some(*got) {
                let meaning = self.meaning(size, symbols);
                let expected = format!("size {meaning} in dimension {dim}");
                return refuse(expected, format!("{sizes:?}"), "");
            }
        }
        // Strides of a dimension of size 1 are never used.
        let is_used = |dim: usize| sizes[dim] != 1;
        if sizes.contains(&0) {
            return Ok(());
        }
        let strides = tensor.stride();
        let wanted: Option<Vec<i64>> = match &input.strides {
            Some(wanted) => wanted.iter().map(|size| size.expression.value(symbols)).collect(),
            None => Some(row_major(&sizes)),
        };
        let fits = |wanted: &Vec<i64>| {
            wanted.len() == strides.len()
                && (0..strides.len()).all(|dim| !is_used(dim) || wanted[dim] == strides[dim])
        };
        if !wanted.as_ref().is_some_and(fits) {
            let is_row_major = wanted.as_ref().is_some_and(|wanted| *wanted == row_major(&sizes));
            let hint = match is_row_major {
                true => "make it so by contiguous",
                false => "give it the layout of the example that the model was exported with",
            };
            let expected =
                wanted.map_or("other strides".into(), |wanted| format!("strides {wanted:?}"));
            return refuse(expected, format!("{strides:?}"), hint);
        }
        Ok(())
    }

    /// A size, its value, and where its symbol comes from.
    fn meaning(&self, size: &Size, symbols: &Symbols) -> String {
        let Some(value) = size.expression.value(symbols) else { return size.text.clone() };
        let mut used = Vec::new();
        size.expression.symbols(&mut used);
        let Some(symbol) = used.first() else { return value.to_string() };
        let defines = |size: &Size| size.expression == Expression::Symbol(symbol.to_string());
        let source = self.inputs.iter().enumerate().find_map(|(index, input)| {
            let dim = input.sizes.iter().position(defines)?;
            Some(format!(", where {symbol} is dimension {dim} of {}", self.name(index)))
        });
        format!("{value} ({}{})", size.text, source.unwrap_or_default())
    }
}

fn input(value: &Value, device: DeviceType) -> std::result::Result<Input, String> {
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let sizes = |name: &str| -> std::result::Result<Option<Vec<Size>>, String> {
        let Some(list) = value.get(name) else { return Ok(None) };
        let list = list.as_array().ok_or_else(|| format!("`{name}` is no list"))?;
        list.iter().map(Size::read).collect::<std::result::Result<_, _>>().map(Some)
    };
    let name = text("kind").ok_or("it has no `kind`")?;
    let kind = kind(name).ok_or_else(|| format!("tch does not know the kind {name:?}"))?;
    let device = match text("device") {
        Some(name) => DeviceType::named(name).ok_or_else(|| format!("no device {name:?}"))?,
        None => device,
    };
    let name = text("name").unwrap_or_default().to_string();
    let strides = sizes("strides")?;
    let sizes = sizes("sizes")?.ok_or("it has no `sizes`")?;
    if strides.as_ref().is_some_and(|strides| strides.len() != sizes.len()) {
        return Err("`strides` and `sizes` differ in length".to_string());
    }
    Ok(Input { name, kind, device, sizes, strides })
}

fn list(sizes: &[Size]) -> String {
    let texts: Vec<&str> = sizes.iter().map(|size| size.text.as_str()).collect();
    format!("[{}]", texts.join(", "))
}

fn row_major(sizes: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; sizes.len()];
    for dim in (1..sizes.len()).rev() {
        strides[dim - 1] = strides[dim] * sizes[dim].max(1);
    }
    strides
}

impl std::fmt::Display for Inputs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, input) in self.inputs.iter().enumerate() {
            let separator = if index == 0 { "" } else { ", " };
            let name =
                if input.name.is_empty() { format!("input {index}") } else { input.name.clone() };
            write!(f, "{separator}{name}: {:?} {}", input.kind, list(&input.sizes))?;
        }
        Ok(())
    }
}
