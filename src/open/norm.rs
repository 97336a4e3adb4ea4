//! `rms_norm`, `layer_norm` and `add_rms_norm` over the last dimension, and their gradients.

use super::Answer;
use super::arguments::{Argument, KINDS, Result};
use super::arrays::{Array, Of, address, can_be_planned};
use super::call::{Call, workspace_bytes};
use crate::ops::kinds::{Device, Kind, compute_kind};
use crate::ops::norm::kernels::add::{AddBackward, AddForward, AddOn};
use crate::ops::norm::kernels::{Backward, Forward, Kernels, On, is_by_columns, takes_parameters};
use crate::ops::norm::plan::{Rows, Way};
use crate::ops::{add_rms_norm as of_sum, layer_norm as centred, rms_norm as uncentred};
use std::ffi::c_void;

const AUTOMATIC: Way = Way::Automatic;

/// The kinds of weight and bias beside rows of this kind.
fn parameter_kinds(rows: Kind, device: Device) -> Vec<Kind> {
    KINDS.into_iter().filter(|&kind| takes_parameters(kind, rows, device)).collect()
}

/// The arguments of a forward.
struct ForwardOf<'a> {
    output: Argument<'a>,
    mean: Option<Argument<'a>>,
    rstd: Argument<'a>,
    input: Argument<'a>,
    weight: Argument<'a>,
    bias: Option<Argument<'a>>,
    eps: Argument<'a>,
}

pub fn rms_norm([output, rstd, input, weight, eps]: [Argument<'_>; 5]) -> Answer {
    let of = ForwardOf { output, mean: None, rstd, input, weight, bias: None, eps };
    forward(&uncentred::KERNELS, of)
}

pub fn layer_norm([output, mean, rstd, input, weight, bias, eps]: [Argument<'_>; 7]) -> Answer {
    let of = ForwardOf { output, mean: Some(mean), rstd, input, weight, bias: Some(bias), eps };
    forward(&centred::KERNELS, of)
}

fn forward(kernels: &Kernels, of: ForwardOf<'_>) -> Answer {
    let (mut call, input) = Call::of(of.input)?;
    let (leading, sizes) = input.rows()?;
    let compute = [compute_kind(input.kind)];
    let output = call.written(of.output, input.array.shape, &[input.kind])?;
    let mean = of.mean.map(|mean| call.may_be_written(mean, leading, &compute)).transpose()?;
    let rstd = call.may_be_written(of.rstd, leading, &compute)?;
    let kinds = parameter_kinds(input.kind, call.device);
    let [weight, bias] =
        parameters(&mut call, [Some(of.weight), of.bias], sizes[1], &kinds, false)?;
    let eps = of.eps.number(f64::MAX)?;
    call.check_overlaps()?;
    let parameters = weight.or(bias).unwrap_or(input).kind;
    let on = On { device: call.device, way: AUTOMATIC, kind: input.kind, parameters };
    let params = Forward {
        input: input.array.address,
        weight: address(weight),
        bias: address(bias),
        output: output.array.address,
        mean: address(mean.flatten()),
        rstd: address(rstd),
        ..Forward::new(sizes, eps)
    };
    // SAFETY: the arrays were checked to be contiguous, of these sizes and kinds, and on this device; those
    // that are written overlap no other.
    call.run(|| unsafe { kernels.run_forward(on, params) })?;
    Ok(None)
}

/// Arrays of `columns` values each, such as weight and bias. All have one kind, which is among those that are
/// given.
fn parameters<'a, const N: usize>(
    call: &mut Call<'a>,
    arguments: [Option<Argument<'a>>; N],
    columns: i64,
    kinds: &[Kind],
    is_written: bool,
) -> Result<[Option<Of<'a>>; N]> {
    let mut found = [None; N];
    let mut kinds = kinds.to_vec();
    for (argument, found) in arguments.into_iter().zip(&mut found) {
        let Some(argument) = argument else { continue };
        *found = match is_written {
            true => call.may_be_written(argument, &[columns], &kinds)?,
            false => call.may_read(argument, &[columns], &kinds)?,
        };
        if let Some(of) = found {
            kinds = vec![of.kind];
        }
    }
    Ok(found)
}

/// The arguments of a backward.
struct BackwardOf<'a> {
    grad_input: Argument<'a>,
    grad_weight: Argument<'a>,
    grad_bias: Option<Argument<'a>>,
    workspace: Argument<'a>,
    grad_output: Argument<'a>,
    input: Argument<'a>,
    weight: Argument<'a>,
    mean: Option<Argument<'a>>,
    rstd: Argument<'a>,
}

pub fn rms_norm_backward(
    [grad_input, grad_weight, workspace, grad_output, input, weight, rstd]: [Argument<'_>; 7],
) -> Answer {
    let of = BackwardOf {
        grad_input,
        grad_weight,
        grad_bias: None,
        workspace,
        grad_output,
        input,
        weight,
        mean: None,
        rstd,
    };
    backward(&uncentred::KERNELS, of, "rms_norm_backward_workspace")
}

pub fn layer_norm_backward(
    [grad_input, grad_weight, grad_bias, workspace, grad_output, input, weight, mean, rstd]: [Argument<'_>;
        9],
) -> Answer {
    let of = BackwardOf {
        grad_input,
        grad_weight,
        grad_bias: Some(grad_bias),
        workspace,
        grad_output,
        input,
        weight,
        mean: Some(mean),
        rstd,
    };
    backward(&centred::KERNELS, of, "layer_norm_backward_workspace")
}

fn backward(kernels: &Kernels, of: BackwardOf<'_>, gives_size: &str) -> Answer {
    let (mut call, input) = Call::of(of.input)?;
    let (leading, sizes) = input.rows()?;
    let shape = input.array.shape;
    let compute = [compute_kind(input.kind)];
    let grad_output = call.read(of.grad_output, shape, &[input.kind])?;
    let mean = of.mean.map(|mean| call.read(mean, leading, &compute)).transpose()?;
    let rstd = call.read(of.rstd, leading, &compute)?;
    let kinds = parameter_kinds(input.kind, call.device);
    let [weight] = parameters(&mut call, [Some(of.weight)], sizes[1], &kinds, false)?;
    let kinds = weight.map_or(kinds, |weight| vec![weight.kind]);
    let grad_input = call.may_be_written(of.grad_input, shape, &[input.kind])?;
    let gradients = [Some(of.grad_weight), of.grad_bias];
    let gradients = parameters(&mut call, gradients, sizes[1], &kinds, true)?;
    let mut workspace = call.workspace(of.workspace)?;
    call.check_overlaps()?;
    let [grad_weight, grad_bias] = gradients;
    let parameters = weight.or(grad_weight).or(grad_bias).unwrap_or(input).kind;
    let on = On { device: call.device, way: AUTOMATIC, kind: input.kind, parameters };
    let mut params = Backward {
        grad_output: grad_output.array.address,
        input: input.array.address,
        weight: address(weight),
        mean: address(mean),
        rstd: rstd.array.address,
        grad_input: address(grad_input),
        grad_weight: address(grad_weight),
        grad_bias: address(grad_bias),
        ..Backward::new(sizes)
    };
    if grad_input.or(grad_weight).or(grad_bias).is_none() {
        return Ok(None);
    }
    kernels.plan_backward(on, &mut params)?;
    let rows_of_scratch = params.rows_of_scratch();
    let bytes = bytes_of_scratch(rows_of_scratch, sizes[1], input.kind);
    let mut scratch = |gradient: Option<Of<'_>>| match gradient {
        Some(_) if rows_of_scratch > 0 => workspace.take(bytes, gives_size),
        _ => Ok(std::ptr::null_mut()),
    };
    params.weight_parts = scratch(grad_weight)?;
    params.bias_parts = scratch(grad_bias)?;
    // SAFETY: as in `forward`; the workspace has room for the scratch, and overlaps no other array.
    call.run(|| unsafe { kernels.run_backward(on.device, &params) })?;
    Ok(None)
}

fn bytes_of_scratch(rows: i64, columns: i64, kind: Kind) -> Option<i64> {
    rows.checked_mul(columns)?.checked_mul(compute_kind(kind).elt_size_in_bytes() as i64)
}

pub fn rms_norm_backward_workspace(of: [Argument<'_>; 4]) -> Answer {
    workspace(&uncentred::KERNELS, "rms_norm_backward_workspace", 1, of)
}

pub fn layer_norm_backward_workspace(of: [Argument<'_>; 4]) -> Answer {
    workspace(&centred::KERNELS, "layer_norm_backward_workspace", 2, of)
}

/// The sizes, the kind and the device of which the size of a workspace is asked.
fn asked([rows, columns, dtype, device]: [Argument<'_>; 4]) -> Result<([i64; 2], On)> {
    let (kind, device) = (dtype.kind()?, device.device()?);
    let on = On { device, way: AUTOMATIC, kind, parameters: kind };
    let sizes = [rows.integer(0)?, columns.integer(1)?];
    if !can_be_planned(sizes) {
        let [rows_given, columns_given] = sizes;
        let got = format!("{rows_given} rows of {columns_given} columns");
        return Err(rows.refuse("ValueError", "an array that fits into memory", got, ""));
    }
    Ok((sizes, on))
}

/// The bytes for scratch of so many sums, at whichever addresses the arrays begin.
fn workspace(kernels: &Kernels, op: &'static str, sums: usize, of: [Argument<'_>; 4]) -> Answer {
    let (sizes, on) = asked(of)?;
    let mut most = 0;
    for alignment in [1, 2, 4, 8, 16] {
        let (plan, parts) = kernels.backward_plan(on, &on.rows(sizes, alignment, true)?)?;
        most = most.max(if is_by_columns(&plan) { 0 } else { parts });
    }
    let piece = bytes_of_scratch(most, sizes[1], on.kind);
    workspace_bytes(op, &vec![piece; sums]).map(Some)
}

/// The kinds of residual and sum beside an input of this kind.
fn stream_kinds(branch: Kind) -> Vec<Kind> {
    let mut kinds = vec![branch, compute_kind(branch)];
    kinds.dedup();
    kinds
}

fn on_sum(device: Device, kind: Kind, stream: Kind, parameters: Kind) -> AddOn {
    AddOn { on: On { device, way: AUTOMATIC, kind, parameters }, stream }
}

/// The error for rows that no one kernel computes.
fn no_kernel(of: &Array<'_>, kind: Kind) -> super::abi::Refusal {
    let values = 16 / kind.elt_size_in_bytes();
    let expected = format!(
        "arrays at multiples of 16 bytes, and rows of a multiple of {values} values that a block of threads can hold"
    );
    let got = format!("shape {:?} at {:#x}", of.shape, of.address.addr());
    of.refuse(expected, got, "add the two arrays and call rms_norm, whose rows may be any")
}

pub fn add_rms_norm(
    [output, sum, rstd, input, residual, weight, eps]: [Argument<'_>; 7],
) -> Answer {
    let (mut call, input) = Call::of(input)?;
    let (leading, sizes) = input.rows()?;
    let shape = input.array.shape;
    let residual = call.read(residual, shape, &stream_kinds(input.kind))?;
    let output = call.written(output, shape, &[input.kind])?;
    let sum = call.written(sum, shape, &[residual.kind])?;
    let rstd = call.may_be_written(rstd, leading, &[compute_kind(input.kind)])?;
    let kinds = parameter_kinds(residual.kind, call.device);
    let [weight] = parameters(&mut call, [Some(weight)], sizes[1], &kinds, false)?;
    let eps = eps.number(f64::MAX)?;
    call.check_overlaps()?;
    let of = on_sum(call.device, input.kind, residual.kind, weight.unwrap_or(residual).kind);
    let mut params = AddForward {
        input: input.array.address,
        residual: residual.array.address,
        weight: address(weight),
        sum: sum.array.address,
        output: output.array.address,
        rstd: address(rstd),
        ..AddForward::new(sizes, eps)
    };
    if !params.plan(of)? {
        return Err(no_kernel(&input.array, input.kind));
    }
    // SAFETY: as in `forward`.
    call.run(|| unsafe { (of_sum::kernels::KERNELS.forward)(of.on.device, &params) })?;
    Ok(None)
}

pub fn add_rms_norm_backward(
    [
        grad_input,
        grad_residual,
        grad_weight,
        workspace,
        grad_output,
        grad_sum,
        sum,
        weight,
        rstd,
    ]: [Argument<'_>; 9],
) -> Answer {
    let (mut call, grad_output) = Call::of(grad_output)?;
    let (leading, sizes) = grad_output.rows()?;
    let (shape, kind) = (grad_output.array.shape, grad_output.kind);
    let sum = call.read(sum, shape, &stream_kinds(kind))?;
    let grad_sum = call.may_read(grad_sum, shape, &[sum.kind])?;
    let rstd = call.read(rstd, leading, &[compute_kind(kind)])?;
    let kinds = parameter_kinds(sum.kind, call.device);
    let [weight] = parameters(&mut call, [Some(weight)], sizes[1], &kinds, false)?;
    let kinds = weight.map_or(kinds, |weight| vec![weight.kind]);
    let grad_input = call.may_be_written(grad_input, shape, &[kind])?;
    let grad_residual = call.may_be_written(grad_residual, shape, &[sum.kind])?;
    let [grad_weight] = parameters(&mut call, [Some(grad_weight)], sizes[1], &kinds, true)?;
    let mut workspace = call.workspace(workspace)?;
    call.check_overlaps()?;
    if grad_input.or(grad_residual).or(grad_weight).is_none() {
        return Ok(None);
    }
    let of = on_sum(call.device, kind, sum.kind, weight.or(grad_weight).unwrap_or(sum).kind);
    let mut params = AddBackward {
        grad_output: grad_output.array.address,
        grad_sum: address(grad_sum),
        sum: sum.array.address,
        weight: address(weight),
        rstd: rstd.array.address,
        grad_residual: address(grad_residual),
        grad_input: address(grad_input),
        ..AddBackward::new(sizes)
    };
    if !params.plan(of)? {
        return Err(no_kernel(&grad_output.array, kind));
    }
    if grad_weight.is_some() {
        let bytes = bytes_of_scratch(params.parts, sizes[1], kind);
        params.weight_parts = workspace.take(bytes, "add_rms_norm_backward_workspace")?;
    }
    let sums: [*mut c_void; 2] = [address(grad_weight), std::ptr::null_mut()];
    // SAFETY: as in `backward`.
    call.run(|| unsafe { of_sum::kernels::KERNELS.run_backward(of, &params, sums) })?;
    Ok(None)
}

pub fn add_rms_norm_backward_workspace(of: [Argument<'_>; 4]) -> Answer {
    let (sizes, on) = asked(of)?;
    let rows_of: Rows = on.rows(sizes, 16, true)?;
    let mut most = 0;
    for stream in stream_kinds(on.kind) {
        let of = AddOn { on, stream };
        if let Some(plan) = of.or_of_cpu(of.backward_plan(&rows_of)) {
            most = most.max(rows_of.parts(&plan, on.device, 0));
        }
    }
    let piece = bytes_of_scratch(most, sizes[1], on.kind);
    workspace_bytes("add_rms_norm_backward_workspace", &[piece]).map(Some)
}
