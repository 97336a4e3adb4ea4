//! Errors as Python's users read them: in torch's words, with the names of the operator's schema, and as
//! the exceptions that torch raises. Rust's users read [`Error`] as it is.

mod words;

use crate::Error;
pub(crate) use words::in_python;

/// The exception that an error becomes. `csrc/library/call.h` mirrors it.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Exception {
    Runtime,
    Value,
    Index,
}

/// An error of an operator, whose arguments have these names and types in the schema.
pub(crate) fn translated(error: &Error, arguments: &[(String, String)]) -> (Exception, String) {
    let named = |name: &str| arguments.iter().find(|(argument, _)| argument == name);
    let Error::Argument { op, argument, expected, got, hint } = error else {
        let text = error.to_string();
        return (Exception::Runtime, text.replace("operations of tch", "operations of torch"));
    };
    // A name of the schema stays, also if it is a word of Rust's.
    let argument = named(argument).map_or_else(|| of_python(argument), |(name, _)| name.clone());
    let kind = named(&argument).map_or("", |(_, kind)| kind.trim_end_matches('?'));
    let exception = exception(&argument, kind, expected);
    let [expected, got, hint] = [expected, got, hint].map(|text| of_python(text));
    let error = Error::argument(op, &argument, expected, got, hint);
    (exception, error.to_string())
}

/// Torch raises a `RuntimeError` for a tensor or a shape that does not fit, and a `ValueError` for a
/// number or a word that means nothing. Its cross-entropy has rules of its own.
fn exception(argument: &str, kind: &str, expected: &str) -> Exception {
    match (argument, kind) {
        ("target", _) if expected.starts_with("classes") => Exception::Index,
        ("target", _) if expected.starts_with("shape") => Exception::Value,
        ("label_smoothing", _) => Exception::Runtime,
        (_, "int" | "SymInt" | "float" | "bool" | "str") => Exception::Value,
        _ => Exception::Runtime,
    }
}

/// How to get the kernels of CUDA, in Rust.
const BUILD: &str =
    "build with a libtorch that has CUDA and an nvcc (cargo xtask doctor says what is missing)";

/// The text in Python's words.
fn of_python(text: &str) -> String {
    in_python(&text.replace(BUILD, "install a build with CUDA").replace("&[", "["))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(argument: &str, expected: &str, got: &str, hint: &str) -> (Exception, String) {
        let schema = [("input", "Tensor"), ("target", "Tensor"), ("dropout", "float")];
        let schema = schema.map(|(name, kind)| (name.to_string(), kind.to_string()));
        translated(&Error::argument("op", argument, expected, got, hint), &schema)
    }

    #[test]
    fn words_are_pythons() {
        let cast = "cast it with to_kind(Kind::Double)";
        for (ours, theirs) in [
            (
                of("input", "kind Float or BFloat16", "Int64", cast),
                "op: input: expected dtype torch.float32 or torch.bfloat16, got torch.int64; \
                 cast it with .to(torch.float64)",
            ),
            (
                of(
                    "input",
                    "device Cuda(1), as target",
                    "Cpu",
                    "move it with to_device(Device::Cuda(1))",
                ),
                "op: input: expected device cuda:1, as target, got cpu; move it with .to(\"cuda:1\")",
            ),
            (
                of("input", "at least one size", "[]", "such as &[features], or call to_kind"),
                "op: input: expected at least one size, got []; such as [features], or call .to",
            ),
            (
                of("dropout", "above 0 (or none)", "Some(0.5)", ""),
                "op: dropout: expected above 0 (or none), got 0.5",
            ),
        ] {
            assert_eq!(ours.1, theirs);
        }
    }

    /// The names of a user's operator are no words of Rust's.
    #[test]
    fn arguments_of_a_schema_keep_their_names() {
        let schema =
            ["kind", "kinds", "i64", "String"].map(|name| (name.to_string(), "int".into()));
        for (name, _) in &schema {
            let error = Error::argument("op", name, "a number above 0", "-1", "");
            let translated = translated(&error, &schema);
            let text = format!("op: {name}: expected a number above 0, got -1");
            assert_eq!(translated, (Exception::Value, text));
        }
    }

    #[test]
    fn exceptions_are_torchs() {
        for (argument, expected, exception) in [
            ("input", "kind Float", Exception::Runtime),
            ("target", "shape [M] = [3]", Exception::Value),
            ("target", "classes from 0 to V - 1 = 3", Exception::Index),
            ("target", "kind Int64", Exception::Runtime),
            ("dropout", "a probability", Exception::Value),
        ] {
            assert_eq!(of(argument, expected, "another", "").0, exception, "{argument} {expected}");
        }
    }
}
