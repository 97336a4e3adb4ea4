//! The words of errors that Python shows: its own, and not those of Rust and tch.

/// What Rust and tch call something, and what Python does.
const WORDS: [(&str, &str); 29] = [
    ("Uint8", "torch.uint8"),
    ("Int8", "torch.int8"),
    ("Int16", "torch.int16"),
    ("Int", "torch.int32"),
    ("Int64", "torch.int64"),
    ("Half", "torch.float16"),
    ("Float", "torch.float32"),
    ("Double", "torch.float64"),
    ("ComplexHalf", "torch.complex32"),
    ("ComplexFloat", "torch.complex64"),
    ("ComplexDouble", "torch.complex128"),
    ("Bool", "torch.bool"),
    ("BFloat16", "torch.bfloat16"),
    ("Float8e5m2", "torch.float8_e5m2"),
    ("Float8e4m3fn", "torch.float8_e4m3fn"),
    ("Float8e5m2fnuz", "torch.float8_e5m2fnuz"),
    ("Float8e4m3fnuz", "torch.float8_e4m3fnuz"),
    ("Cpu", "cpu"),
    ("kind", "dtype"),
    ("kinds", "dtypes"),
    ("to_kind", ".to"),
    ("to_device", ".to"),
    ("i64", "int"),
    ("f64", "float"),
    ("String", "str"),
    ("Kind", "torch.dtype"),
    ("Device", "torch.device"),
    ("Layout", "torch.layout"),
    ("MemoryFormat", "torch.memory_format"),
];

/// Names of values, in whose place Python has the value alone: `Some(0.5)`, `Int(3)`.
const WRAPPERS: [&str; 10] = [
    "Some",
    "Int",
    "Float",
    "Bool",
    "String",
    "Device",
    "Kind",
    "Layout",
    "MemoryFormat",
    "SymInt",
];

/// Paths that the compiler puts before the names of types.
const PATHS: [&str; 6] = [
    "alloc::string::",
    "alloc::vec::",
    "core::option::",
    "tch::wrappers::tensor::",
    "tch::wrappers::kind::",
    "tch::wrappers::device::",
];

pub(crate) fn in_python(text: &str) -> String {
    let text = PATHS.iter().fold(text.to_string(), |text, path| text.replace(path, ""));
    let (mut python, mut rest) = (String::new(), text.as_str());
    // Whether a device stands in a call, where Python quotes its name.
    let mut quote = "";
    while let Some(first) = rest.chars().next() {
        let len = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (word, after) = rest.split_at(len.max(first.len_utf8()));
        rest = after;
        let inside = |open, close| inside(after, open, close);
        let is_enum = ["Kind", "Device"].contains(&word);
        if let Some(variant) = after.strip_prefix("::").filter(|_| is_enum) {
            (rest, quote) = (variant, if word == "Device" { "\"" } else { "" });
            continue;
        } else if let Some((index, after)) = inside('(', ')').filter(|_| word == "Cuda") {
            python += &format!("{quote}cuda:{index}{quote}");
            rest = after;
        } else if let Some((value, after)) = inside('(', ')').filter(|_| WRAPPERS.contains(&word)) {
            python += &match (word, value) {
                ("Bool", "true") => "True".to_string(),
                ("Bool", "false") => "False".to_string(),
                _ => in_python(value),
            };
            rest = after;
        } else if let Some((item, after)) =
            inside('<', '>').filter(|_| ["Option", "Vec"].contains(&word))
        {
            let of = if word == "Vec" { "List" } else { "Optional" };
            python += &format!("{of}[{}]", in_python(item));
            rest = after;
        } else if word != "&" || !after.starts_with(|c: char| c.is_alphabetic() || c == '[') {
            let known = WORDS.iter().find(|(rust, _)| *rust == word).map(|(_, python)| python);
            python += &format!("{quote}{}{quote}", known.unwrap_or(&word));
        }
        quote = "";
    }
    python
}

/// What stands between brackets with which a text begins, and what follows them.
fn inside(text: &str, open: char, close: char) -> Option<(&str, &str)> {
    let mut depth = 0_usize;
    for (place, c) in text.char_indices() {
        match c {
            c if c == open => depth += 1,
            c if c == close && depth == 1 => return Some((&text[1..place], &text[place + 1..])),
            c if c == close => depth = depth.checked_sub(1)?,
            _ => {}
        }
        if depth == 0 {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_rust_become_python_s() {
        for (rust, python) in [
            ("kind Float or BFloat16", "dtype torch.float32 or torch.bfloat16"),
            ("cast it with to_kind(Kind::Double)", "cast it with .to(torch.float64)"),
            ("device Cuda(1), as x", "device cuda:1, as x"),
            ("move it with to_device(Device::Cuda(0))", "move it with .to(\"cuda:0\")"),
            ("move it with to_device(Device::Cpu)", "move it with .to(\"cpu\")"),
            ("Some(0.5)", "0.5"),
            ("shape [B, F] = [2, 3]", "shape [B, F] = [2, 3]"),
            ("Int(-3), and f64 was asked for", "-3, and float was asked for"),
            ("Bool(true), and alloc::string::String was", "True, and str was"),
            ("core::option::Option<alloc::vec::Vec<i64>>", "Optional[List[int]]"),
            ("Device(Cuda(0)) and Kind(Half)", "cuda:0 and torch.float16"),
            ("a &Tensor of `&[features]` & more", "a Tensor of `[features]` & more"),
            ("aten::Int of Floating, (Cuda(", "aten::torch.int32 of Floating, (Cuda("),
            ("größer ≥ 3 — naïve", "größer ≥ 3 — naïve"),
            ("", ""),
        ] {
            assert_eq!(in_python(rust), python);
        }
    }
}
