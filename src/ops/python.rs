//! `_functions.py` of the package for Python: the operators as functions, as their definitions say. `cargo
//! xtask python` writes the file, and the test here compares it.

use super::definitions::*;
use super::generated::compare;
use crate::library::expansion::Argument;
use crate::operator::{Operator, Slots};
use std::fmt::Write;

const FILE: &str = "tch-extension-python/python/tch_extension/_functions.py";

/// What Python calls a type of a schema.
fn type_of(schema: &str) -> String {
    if let Some(item) = schema.strip_suffix('?') {
        return format!("Optional[{}]", type_of(item));
    }
    match schema.strip_suffix("[]") {
        Some(item) => format!("Sequence[{}]", type_of(item)),
        None => schema.to_string(),
    }
}

/// The lines of documentation before the operator's signature.
fn documentation(operator: &str) -> String {
    let path = format!("{}/src/ops/{operator}/mod.rs", env!("CARGO_MANIFEST_DIR"));
    let source = std::fs::read_to_string(path).expect("the operator's module");
    let (_, signature) = source.split_once("crate::signature! {\n").expect("a signature");
    let lines = signature.lines().map_while(|line| line.trim_start().strip_prefix("///"));
    lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

/// The operator as a function.
fn function<O: Operator>() -> Result<(&'static str, String), std::fmt::Error> {
    let mut text = String::new();
    let declared = |argument: &Argument| {
        let Argument { name, schema, default, .. } = argument;
        let default =
            default.as_ref().map(|default| format!(" = {}", default.text.replace('\'', "\"")));
        format!("    {name}: {}{},\n", type_of(schema), default.unwrap_or_default())
    };
    let arguments = O::arguments();
    let names: Vec<&str> = arguments.iter().map(|argument| &*argument.name).collect();
    let result = match O::Out::NAMES.len() {
        1 => "Tensor".to_string(),
        count => format!("Tuple[{}]", vec!["Tensor"; count].join(", ")),
    };
    let declared: String = arguments.iter().map(declared).collect();
    writeln!(text, "@typed\ndef {}(\n{declared}) -> {result}:", O::NAME)?;
    let documentation = documentation(O::NAME);
    let end = if documentation.contains('\n') { "\n    " } else { "" };
    let indented = documentation.replace('\n', "\n    ").replace("\n    \n", "\n\n");
    writeln!(text, "    \"\"\"{indented}{end}\"\"\"")?;
    writeln!(text, "    return _ops.{}({})", O::NAME, names.join(", "))?;
    Ok((O::NAME, text))
}

fn file() -> Result<String, std::fmt::Error> {
    macro_rules! functions {
        ($($name:ident of $family:literal { operator: [$operator:ident, $tensors:ident], $($rest:tt)* })*) => {
            vec![$(function::<$operator>()?),*]
        };
    }
    let mut all = operators!(functions);
    all.sort_unstable();
    let mut text = String::from(
        "\"\"\"The operators as functions, as their definitions in Rust say: `cargo xtask python` writes this file.\"\"\"\n\n\
         from typing import Optional, Sequence, Tuple\n\n\
         import torch\n\
         from torch import Tensor\n\n\
         from ._typed import typed\n\n\
         _ops = torch.ops.tch_extension\n\n",
    );
    let names: String = all.iter().map(|(name, _)| format!("    \"{name}\",\n")).collect();
    writeln!(text, "__all__ = [\n{names}]")?;
    for (_, function) in all {
        write!(text, "\n\n{function}")?;
    }
    Ok(text)
}

#[test]
fn the_functions_are_what_the_definitions_say() {
    compare(FILE, &file().expect("a text"), "python");
}
