//! The error message for a call for which the dispatcher finds no kernel. The dispatcher's own
//! message lists every registration of every backend, and some twenty fallbacks that are not real
//! kernels.

use super::operator::split;
use crate::ffi::library as ffi;

/// Turns the dispatcher's message that there is no kernel into one line. Returns `None` for any
/// other message. `caller` is the operator that was called; the operator that lacks a kernel may be
/// one that it calls.
pub(super) fn missing(message: &str, caller: &str) -> Option<String> {
    let (name, problem) = could_not_run(message).or_else(|| no_tensors(message))?;
    let calls = if name == caller { "it".to_string() } else { format!("it calls {name}, which") };
    let backends = backends(name).join(" or ");
    let none = "load the library that has them";
    Some(match (problem, backends.is_empty()) {
        (Problem::NoKernel(backend), false) => {
            format!(
                "{calls} has no kernel for {backend}, only for {backends}; give it tensors on {backends}"
            )
        }
        (Problem::NoKernel(backend), true) => {
            format!("{calls} has no kernel for {backend}, nor for any other device; {none}")
        }
        (Problem::NoTensors, false) => {
            format!(
                "{calls} got no tensor argument, so no device to choose a kernel for; there are kernels for {backends}"
            )
        }
        (Problem::NoTensors, true) => format!("{calls} has no kernel for any device; {none}"),
    })
}

enum Problem<'a> {
    NoKernel(&'a str),
    NoTensors,
}

fn could_not_run(message: &str) -> Option<(&str, Problem<'_>)> {
    let (_, rest) = message.split_once("Could not run '")?;
    let (name, rest) = rest.split_once("' with arguments from the '")?;
    let (backend, _) = rest.split_once("' backend.")?;
    Some((name, Problem::NoKernel(backend)))
}

fn no_tensors(message: &str) -> Option<(&str, Problem<'_>)> {
    let (_, rest) = message.split_once("There were no tensor arguments to this function")?;
    let (_, rest) = rest.split_once("no fallback function is registered for schema ")?;
    let name = rest.split_whitespace().next()?;
    Some((name.trim_end_matches('.'), Problem::NoTensors))
}

/// The operator's backends on which tch has tensors. Meta is left out, because its kernels only
/// compute shapes.
fn backends(name: &str) -> Vec<String> {
    let (base, overload) = split(name);
    let operator = ffi::Operator::find(base, overload).ok().flatten();
    let text = operator.and_then(|operator| operator.backends().ok()).unwrap_or_default();
    text.lines().filter(|line| !line.ends_with("Meta")).map(String::from).collect()
}
