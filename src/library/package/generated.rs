//! What the C++ that AOTInductor generated says about a model's inputs. The package contains it next
//! to the compiled library.
//!
//! It has a check of each input, which is off unless an environment variable is set when the model
//! first runs, reads past the end of a tensor with too few dimensions, leaks the inputs if it
//! fails, and does not know which sizes must be equal. So it is read here instead. It tells the
//! kinds and the fixed sizes and strides, and often all that there is to know.

use super::expression::Expression;
use super::inputs::{DeviceType, Input, Inputs, Range, Size, kind};
use std::collections::BTreeMap;
use tch::Kind;

/// What is known of the inputs.
#[derive(Debug, PartialEq)]
pub(super) struct Generated {
    inputs: Vec<Known>,
}

/// What is known of an input.
#[derive(Debug, Default, PartialEq)]
struct Known {
    kind: Option<Kind>,
    device: Option<DeviceType>,
    sizes: BTreeMap<usize, KnownSize>,
    /// The strides that are numbers. Others depend on sizes.
    strides: BTreeMap<usize, i64>,
}

#[derive(Debug, Default, PartialEq)]
struct KnownSize {
    fixed: Option<i64>,
    least: Option<i64>,
    most: Option<i64>,
    /// The symbol that has its value from here.
    symbol: Option<String>,
}

impl Generated {
    /// Reads the source. Returns `None` if it has no checks in the form that is expected.
    pub fn read(source: &str) -> Option<Generated> {
        let mut inputs: Vec<Known> = Vec::new();
        let mut names = Vec::new();
        for line in source.lines().map(str::trim) {
            if let Some((name, index)) = handle(line) {
                if index != inputs.len() {
                    return None;
                }
                names.push(name.to_string());
                inputs.push(Known::default());
            } else if let Some(symbol) = Symbol::read(line) {
                if let Some(place) = names.iter().position(|name| name == symbol.input) {
                    let size = inputs[place].sizes.entry(symbol.dim).or_default();
                    size.symbol = Some(symbol.name.to_string());
                }
            } else if let (Some(name), Some(input)) = (names.last(), inputs.last_mut()) {
                input.note(name, line);
            }
        }
        let is_known = |input: &Known| input.kind.is_some() && input.device.is_some();
        (!inputs.is_empty() && inputs.iter().all(is_known)).then_some(Generated { inputs })
    }

    /// The inputs, or what the source leaves open.
    pub fn inputs(&self) -> Result<Inputs, String> {
        let mut ranges = BTreeMap::new();
        let mut inputs = Vec::new();
        for (index, known) in self.inputs.iter().enumerate() {
            let (Some(kind), Some(device)) = (known.kind, known.device) else {
                return Err(format!("the kind and the device of input {index}"));
            };
            let rank = known.rank();
            let (mut sizes, mut strides) = (Vec::new(), Vec::new());
            for dim in 0..rank {
                let size = known.sizes.get(&dim).map(|size| self.size(size, &mut ranges));
                sizes.push(size.flatten().ok_or_else(|| {
                    format!("which other size is that of dimension {dim} of input {index}")
                })?);
                let stride = known.strides.get(&dim);
                strides.push(Size::number(*stride.ok_or_else(|| {
                    format!(
                        "the stride of dimension {dim} of input {index}, which depends on sizes"
                    )
                })?));
            }
            let strides = Some(strides);
            inputs.push(Input { name: String::new(), kind, device, sizes, strides });
        }
        Ok(Inputs { inputs, ranges })
    }

    fn size(&self, size: &KnownSize, ranges: &mut BTreeMap<String, Range>) -> Option<Size> {
        if let Some(fixed) = size.fixed {
            return Some(Size::number(fixed));
        }
        let range = Range { least: size.least?, most: size.most };
        if let Some(symbol) = &size.symbol {
            ranges.insert(symbol.clone(), range);
            return Some(Size::symbol(symbol));
        }
        // It depends on symbols from elsewhere. If there is only one, and its range is the same, it
        // is that symbol: twice the symbol, or one more, has another range. Only a range from 0
        // without an end does not tell.
        let sizes = self.inputs.iter().flat_map(|input| input.sizes.values());
        let mut symbols = sizes.filter(|other| other.symbol.is_some());
        let (only, more) = (symbols.next()?, symbols.next());
        let is_same = (only.least, only.most) == (size.least, size.most);
        let tells = range.least > 0 || range.most.is_some();
        let name = only.symbol.as_ref().filter(|_| is_same && tells && more.is_none())?;
        Some(Size::symbol(name))
    }

    /// Where a description of the inputs contradicts the source.
    pub fn contradiction(&self, described: &Inputs) -> Option<String> {
        if described.inputs.len() != self.inputs.len() {
            let (described, own) = (described.inputs.len(), self.inputs.len());
            return Some(format!("it describes {described} inputs of {own}"));
        }
        let pairs = described.inputs.iter().zip(&self.inputs);
        pairs.enumerate().find_map(|(index, (described, known))| {
            let differs = |what: &str| Some(format!("input {index} has another {what}"));
            if Some(described.kind) != known.kind {
                return differs("kind");
            }
            if Some(described.device) != known.device {
                return differs("device");
            }
            if described.sizes.len() != known.rank() {
                return differs("number of dimensions");
            }
            let number = |size: &Size| match size.expression {
                Expression::Number(number) => Some(number),
                _ => None,
            };
            let other_size = described.sizes.iter().enumerate().find(|(dim, size)| {
                known.sizes.get(dim).is_some_and(|known| known.fixed != number(size))
            });
            if let Some((dim, _)) = other_size {
                return differs(&format!("size in dimension {dim}"));
            }
            let strides = described.strides.iter().flatten().enumerate();
            let is_other = |(dim, stride): &(usize, &Size)| {
                number(stride).is_some_and(|stride| {
                    known.strides.get(dim).is_some_and(|known| *known != stride)
                })
            };
            let (dim, _) = strides.into_iter().find(is_other)?;
            differs(&format!("stride in dimension {dim}"))
        })
    }
}

impl Known {
    fn rank(&self) -> usize {
        let dims = self.sizes.keys().chain(self.strides.keys());
        dims.max().map_or(0, |dim| dim + 1)
    }

    /// Notes what a line of the check of the input `name` says.
    fn note(&mut self, name: &str, line: &str) {
        // int32_t arg0_1_expected_dtype = aoti_torch_dtype_float32();
        let value = |what: &str| {
            line.strip_prefix("int32_t ")?
                .strip_prefix(name)?
                .strip_prefix(what)?
                .strip_prefix(" = ")?
                .strip_suffix(';')
        };
        if let Some(call) = value("_expected_dtype") {
            let dtype =
                call.strip_prefix("aoti_torch_dtype_").and_then(|call| call.strip_suffix("()"));
            self.kind = dtype.and_then(kind);
        }
        // int32_t arg0_1_expected_device_type = 0;
        match value("_expected_device_type") {
            Some("0") => self.device = Some(DeviceType::Cpu),
            Some("1") => self.device = Some(DeviceType::Cuda),
            _ => {}
        }
        let Some(condition) = line.strip_prefix("if (").and_then(|rest| rest.strip_suffix(") {"))
        else {
            return;
        };
        let words: Vec<&str> = condition.split(' ').collect();
        let [left, sign, right] = words[..] else { return };
        match sign {
            // if (4 != arg0_1_size[1]) {    if (1 != arg0_1_stride[1]) {
            "!=" => {
                let Ok(number) = left.parse() else { return };
                if let Some(dim) = element(right, name, "_size") {
                    self.sizes.entry(dim).or_default().fixed = Some(number);
                } else if let Some(dim) = element(right, name, "_stride") {
                    self.strides.insert(dim, number);
                }
            }
            // if (arg0_1_size[0] < 2) {    if (arg0_1_size[0] > 64) {
            "<" | ">" => {
                let (Some(dim), Ok(bound)) = (element(left, name, "_size"), right.parse()) else {
                    return;
                };
                let size = self.sizes.entry(dim).or_default();
                *(if sign == "<" { &mut size.least } else { &mut size.most }) = Some(bound);
            }
            _ => {}
        }
    }
}

/// `ConstantHandle arg0_1 = ConstantHandle(input_handles[0]);`, with which the check of an input
/// begins: its name and its index.
fn handle(line: &str) -> Option<(&str, usize)> {
    let (name, call) = line.strip_prefix("ConstantHandle ")?.split_once(" = ")?;
    let index = call.strip_prefix("ConstantHandle(input_handles[")?.strip_suffix("]);")?;
    Some((name, index.parse().ok()?))
}

/// `int64_t s17 = arg0_1_size[0];`
struct Symbol<'a> {
    name: &'a str,
    input: &'a str,
    dim: usize,
}

impl<'a> Symbol<'a> {
    fn read(line: &'a str) -> Option<Symbol<'a>> {
        let rest = line.strip_prefix("int64_t ").or_else(|| line.strip_prefix("auto "))?;
        let (name, size) = rest.strip_suffix(';')?.split_once(" = ")?;
        let (input, dim) = size.split_once("_size[")?;
        Some(Symbol { name, input, dim: dimension(dim.strip_suffix(']')?)? })
    }
}

/// The dimension in `arg0_1_size[1]`.
fn element(text: &str, name: &str, what: &str) -> Option<usize> {
    let rest = text.strip_prefix(name)?.strip_prefix(what)?;
    dimension(rest.strip_prefix('[')?.strip_suffix(']')?)
}

/// No tensor has more than 64 dimensions.
fn dimension(text: &str) -> Option<usize> {
    text.parse().ok().filter(|dim| *dim < 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that count, as torch 2.11 and 2.13 write them, of inputs with these sizes and
    /// strides. `2..64` is a range.
    fn source(inputs: &[(&str, &[&str], &[&str])], symbols: &[&str]) -> String {
        let mut text = String::new();
        for (index, (dtype, sizes, strides)) in inputs.iter().enumerate() {
            text += &format!(
                "    ConstantHandle arg{index}_1 = ConstantHandle(input_handles[{index}]);
    int32_t arg{index}_1_dtype;
    int32_t arg{index}_1_expected_dtype = aoti_torch_dtype_{dtype}();
    if (arg{index}_1_expected_dtype != arg{index}_1_dtype) {{
    auto arg{index}_1_size = arg{index}_1.sizes();\n"
            );
            for (dim, size) in sizes.iter().enumerate() {
                let place = format!("arg{index}_1_size[{dim}]");
                let Some((least, most)) = size.split_once("..") else {
                    text += &format!("    if ({size} != {place}) {{\n");
                    continue;
                };
                text += &format!("    if ({place} < {least}) {{\n");
                if !most.is_empty() {
                    text += &format!("    if ({place} > {most}) {{\n");
                }
            }
            for (dim, stride) in strides.iter().enumerate().filter(|(_, stride)| **stride != "?") {
                text += &format!("    if ({stride} != arg{index}_1_stride[{dim}]) {{\n");
            }
            text += &format!("    int32_t arg{index}_1_expected_device_type = 0;\n");
        }
        symbols.iter().for_each(|symbol| text += &format!("    int64_t {symbol};\n"));
        text
    }

    fn inputs(inputs: &[(&str, &[&str], &[&str])], symbols: &[&str]) -> Result<Inputs, String> {
        Generated::read(&source(inputs, symbols)).expect("checks").inputs()
    }

    #[test]
    fn fixed_sizes_and_a_single_bounded_symbol_are_known() {
        let found = inputs(&[("float32", &["2", "4"], &["4", "1"]), ("bool", &[], &[])], &[]);
        let device = r#""device": "cpu""#;
        let expected = format!(
            r#"{{"inputs": [{{"kind": "float32", "sizes": [2, 4], "strides": [4, 1], {device}}},
                {{"kind": "bool", "sizes": [], "strides": [], {device}}}]}}"#
        );
        assert_eq!(found, Inputs::read(&expected, DeviceType::Cuda));
        for (range, json) in [("1..", "[1, null]"), ("0..64", "[0, 64]"), ("2..64", "[2, 64]")] {
            let found = inputs(
                &[("float32", &[range, "4"], &["4", "1"]), ("int64", &[range], &["1"])],
                &["s17 = arg0_1_size[0]", "u0 = buf1_size[0]"],
            );
            let expected = format!(
                r#"{{"inputs": [{{"kind": "float32", "sizes": ["s17", 4], "strides": [4, 1], {device}}},
                    {{"kind": "int64", "sizes": ["s17"], "strides": [1], {device}}}],
                    "ranges": {{"s17": {json}}}}}"#
            );
            assert_eq!(found, Inputs::read(&expected, DeviceType::Cuda), "{range}");
        }
    }

    #[test]
    fn what_the_source_leaves_open_is_said() {
        type Case<'a> = (&'a [(&'a str, &'a [&'a str], &'a [&'a str])], &'a [&'a str], &'a str);
        let symbol: &[&str] = &["s0 = arg0_1_size[0]"];
        let cases: [Case<'_>; 5] = [
            // Twice the size has the same range.
            (
                &[("int8", &["0.."], &["1"]), ("int8", &["0.."], &["1"])],
                symbol,
                "dimension 0 of input 1",
            ),
            // Another range: not the same size.
            (
                &[("int8", &["1.."], &["1"]), ("int8", &["2.."], &["1"])],
                symbol,
                "dimension 0 of input 1",
            ),
            // Either of two symbols.
            (
                &[("int8", &["1..", "1.."], &["8", "1"]), ("int8", &["1.."], &["1"])],
                &["s0 = arg0_1_size[0]", "s1 = arg0_1_size[1]"],
                "which other size is that of dimension 0 of input 1",
            ),
            // A stride that depends on a size.
            (
                &[("int8", &["1..", "2.."], &["?", "1"])],
                &["s0 = arg0_1_size[0]", "s1 = arg0_1_size[1]"],
                "the stride of dimension 0 of input 0, which depends on sizes",
            ),
            // A dimension of which nothing is said.
            (&[("int8", &[], &["?", "1"])], &[], "dimension 0 of input 0"),
        ];
        for (described, symbols, expected) in cases {
            let open = inputs(described, symbols).expect_err("something is open");
            assert!(open.contains(expected), "{open}");
        }
    }

    #[test]
    fn another_source_is_not_understood() {
        let good = source(&[("float32", &["2"], &["1"])], &[]);
        assert!(Generated::read(&good).is_some());
        for bad in [
            String::new(),
            "int main() {}".to_string(),
            good.replace("aoti_torch_dtype_float32", "aoti_torch_dtype_float4"),
            good.replace("expected_device_type = 0", "expected_device_type = 7"),
            good.replace("input_handles[0]", "input_handles[1]"),
        ] {
            assert_eq!(Generated::read(&bad), None, "{bad}");
        }
    }
}
