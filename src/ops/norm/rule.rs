//! The kinds and sizes that the operators that normalise rows take.

use super::tensors::compute_kind;
use crate::check::cast_one;
use crate::operator::{Dim, Meta};
use crate::{Error, Result};
use tch::{Device, Kind};

pub(in crate::ops) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Checks the arguments of a norm, and returns the number of rows.
pub(in crate::ops) fn rule<D: Dim>(
    op: &str,
    input: &Meta<D>,
    parameters: [Option<&Meta<D>>; 2],
    normalized_shape: &[i64],
) -> Result<D> {
    let rows = check_input(op, input, normalized_shape)?;
    // While a program is traced, the device may be any.
    let device = if D::IS_TRACED { Device::Cpu } else { input.device() };
    check_parameters(parameters, input, normalized_shape, parameter_kinds(input.kind(), device))?;
    Ok(rows)
}

/// Checks the arguments of a norm of a sum, and returns the number of rows.
pub(in crate::ops) fn add_rule<D: Dim>(
    op: &str,
    [input, residual]: [&Meta<D>; 2],
    parameters: [Option<&Meta<D>>; 2],
    normalized_shape: &[i64],
    dropout: f64,
) -> Result<D> {
    let rows = check_input(op, input, normalized_shape)?;
    let with_float = [input.kind(), Kind::Float];
    let kinds = if is_half(input.kind()) { &with_float[..] } else { &with_float[..1] };
    let residual = residual.same_device_as(input)?.kind_in(&KINDS)?;
    check_kind(residual.shape("as input", input.sizes())?, input, kinds)?;
    check_parameters(parameters, input, normalized_shape, kinds)?;
    check_dropout(op, dropout)?;
    Ok(rows)
}

pub(in crate::ops) fn check_dropout(op: &str, dropout: f64) -> Result<()> {
    if (0.0..=1.0).contains(&dropout) {
        return Ok(());
    }
    let (expected, got) = ("a probability from 0 to 1", dropout.to_string());
    Err(Error::argument(op, "dropout", expected, got, "use 0 for no dropout, as in evaluation"))
}

pub(super) fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// A number for each row, of the kind that is computed in.
pub(in crate::ops) fn moment<D: Dim>(input: &Meta<D>, rows: &D) -> Meta<D> {
    input.sized([rows.clone()]).of_kind(compute_kind(input.kind()))
}

fn check_input<D: Dim>(op: &str, input: &Meta<D>, normalized_shape: &[i64]) -> Result<D> {
    let sizes = input.supported_device()?.kind_in(&KINDS)?.sizes();
    if normalized_shape.is_empty() {
        return Err(Error::argument(
            op,
            "normalized_shape",
            "at least one dimension",
            "[]",
            "pass the trailing sizes of the input, such as &[features]",
        ));
    }
    let parts = sizes.len().checked_sub(normalized_shape.len()).map(|lead| sizes.split_at(lead));
    let Some((leading, _)) = parts.filter(|(_, columns)| may_be(columns, normalized_shape)) else {
        let wanted: Vec<String> = normalized_shape.iter().map(i64::to_string).collect();
        let expected = format!("shape [*, {}], as normalized_shape has it", wanted.join(", "));
        return Err(input.refuse(expected, format!("{sizes:?}"), ""));
    };
    match (D::product(leading), i64::product(normalized_shape)) {
        (Some(rows), Some(_)) => Ok(rows),
        _ => {
            let expected = "sizes whose products fit 64 bits";
            Err(input.refuse(expected, format!("{sizes:?}"), ""))
        }
    }
}

/// Checks weight and bias, which may have these kinds, both the same one.
fn check_parameters<D: Dim>(
    parameters: [Option<&Meta<D>>; 2],
    input: &Meta<D>,
    normalized_shape: &[i64],
    kinds: &[Kind],
) -> Result<()> {
    let mut first = None;
    for parameter in parameters.into_iter().flatten() {
        check_kind(parameter.same_device_as(input)?.kind_in(&KINDS)?, input, kinds)?;
        parameter.kind_as(*first.get_or_insert(parameter.kind()), "weight")?;
        if !may_be(parameter.sizes(), normalized_shape) {
            let expected = format!("shape [normalized_shape] = {normalized_shape:?}");
            return Err(parameter.refuse(expected, format!("{:?}", parameter.sizes()), ""));
        }
    }
    Ok(())
}

/// Checks that the argument has one of these kinds: the input's, or, if there are two, `Float`.
fn check_kind<D: Dim>(argument: &Meta<D>, input: &Meta<D>, kinds: &[Kind]) -> Result<()> {
    let (found, kind) = (argument.kind(), input.kind());
    if kinds.contains(&found) {
        return Ok(());
    }
    let or_float = if kinds.len() > 1 { ", or Float" } else { "" };
    let hint = cast_one(found, kind, "input");
    Err(argument.refuse(format!("kind {kind:?}, as input{or_float}"), format!("{found:?}"), hint))
}

/// Whether sizes are these numbers, as far as they are known.
fn may_be<D: Dim>(sizes: &[D], numbers: &[i64]) -> bool {
    let is_equal = |(size, number): (&D, &i64)| size.number().is_none_or(|size| size == *number);
    sizes.len() == numbers.len() && sizes.iter().zip(numbers).all(is_equal)
}

/// The table of mixed kinds: the kinds that weight and bias may have, both the same one, for an
/// input of this kind. The result always has the input's kind. libtorch's own layer_norm accepts the
/// same kinds, which a test checks.
pub(in crate::ops) fn parameter_kinds(input: Kind, device: Device) -> &'static [Kind] {
    match (input, device) {
        (Kind::Half, Device::Cpu) => &[Kind::Half, Kind::Float],
        (Kind::BFloat16, Device::Cpu) => &[Kind::BFloat16, Kind::Float],
        (Kind::Half, _) => &[Kind::Half],
        (Kind::BFloat16, _) => &[Kind::BFloat16],
        (Kind::Double, _) => &[Kind::Double],
        _ => &[Kind::Float],
    }
}
