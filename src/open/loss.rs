//! `cross_entropy` of rows of logits, and its gradient.

use super::Answer;
use super::arguments::{Argument, Result};
use super::arrays::{Array, Of, address};
use super::call::{Call, Workspace, workspace_bytes};
use crate::ops::kinds::{Device, Kind, compute_kind};
use crate::ops::loss::kernels::{Rows, Total, wrong_target};
use std::ptr::{null, null_mut};

const GIVES_SIZE: &str = "cross_entropy_workspace";

/// What is made of the rows' losses.
#[derive(Clone, Copy, PartialEq)]
enum Reduction {
    None,
    Mean,
    Sum,
}

fn reduction_of(argument: Argument<'_>) -> Result<Reduction> {
    match argument.one_of(&["none", "mean", "sum"])? {
        0 => Ok(Reduction::None),
        1 => Ok(Reduction::Mean),
        _ => Ok(Reduction::Sum),
    }
}

/// What forward and backward read.
struct Reads<'a> {
    input: Of<'a>,
    leading: &'a [i64],
    sizes: [i64; 2],
    target: Array<'a>,
    weight: Option<Of<'a>>,
    ignore_index: i64,
    reduction: Reduction,
    label_smoothing: f64,
}

impl<'a> Reads<'a> {
    fn of(
        [input, target, weight, ignore_index, reduction, label_smoothing]: [Argument<'a>; 6],
    ) -> Result<(Call<'a>, Self)> {
        let (mut call, input) = Call::of(input)?;
        let (leading, sizes) = input.rows()?;
        let [rows, columns] = sizes;
        if input.array.shape != [rows, columns] {
            let got = format!("{:?}", input.array.shape);
            return Err(input.array.refuse("shape [M, V]", got, "reshape it"));
        }
        let target = targets(&mut call, target, rows)?;
        let weight = call.may_read(weight, &[columns], &[compute_kind(input.kind)])?;
        let reads = Reads {
            input,
            leading,
            sizes,
            target,
            weight,
            ignore_index: ignore_index.integer(i64::MIN)?,
            reduction: reduction_of(reduction)?,
            label_smoothing: label_smoothing.number(1.0)?,
        };
        Ok((call, reads))
    }

    /// On the CPU, refuses a target that is no class. On CUDA the kernel stops the program.
    fn check_targets(&self, device: Device) -> Result<()> {
        let [rows, columns] = self.sizes;
        if device != Device::Cpu {
            return Ok(());
        }
        // SAFETY: `targets` has checked the type and the number of integers.
        let all = unsafe { self.target.integers(rows) };
        let Some((at, wrong)) = wrong_target(all, columns, self.ignore_index) else {
            return Ok(());
        };
        let (last, ignore_index) = (columns - 1, self.ignore_index);
        let expected = format!("classes from 0 to V - 1 = {last}, or ignore_index {ignore_index}");
        Err(self.target.refuse(expected, format!("{wrong} at {at}"), ""))
    }

    /// Parameters that write nothing.
    fn params(&self) -> Rows {
        let [rows, classes] = self.sizes;
        Rows {
            rows,
            classes,
            row_stride: classes,
            ignore_index: self.ignore_index,
            grad_stride: 0,
            label_smoothing: self.label_smoothing,
            softcap: 0.0,
            z_loss: 0.0,
            kind: self.input.kind.code(),
            of_mean: (self.reduction == Reduction::Mean).into(),
            wide_grads: 0,
            wide_total: 0,
            logits: self.input.array.address,
            targets: self.target.address.cast_const().cast(),
            weight: address(self.weight),
            weight_sum: null(),
            losses: null_mut(),
            factor: null_mut(),
            grads: null(),
            gradients: null_mut(),
            total: null_mut(),
        }
    }

    /// Scratch for what a mean is multiplied by and for the sum of the weights.
    fn scratch(&self, params: &mut Rows, workspace: &mut Workspace<'_>) -> Result<()> {
        let [factor, weight_sum] =
            [workspace.take(Some(8), GIVES_SIZE)?, workspace.take(Some(8), GIVES_SIZE)?];
        if self.reduction == Reduction::Mean {
            params.factor = factor;
        }
        if self.weight.is_some() {
            params.weight_sum = weight_sum;
        }
        Ok(())
    }

    /// Runs the kernels, after the one for the sum of the weights.
    fn run(&self, call: &Call<'_>, params: Rows) -> Result<()> {
        let sum = Total {
            rows: params.classes,
            classes: 0,
            ignore_index: 0,
            kind: compute_kind(self.input.kind).code(),
            of_mean: 0,
            targets: null(),
            weight: null(),
            losses: params.weight,
            factor: null_mut(),
            total: params.weight_sum.cast_mut(),
        };
        call.run(|| {
            if !sum.total.is_null() {
                // SAFETY: the weights and the scratch were checked; one number is written.
                unsafe { sum.run(call.device)? };
            }
            // SAFETY: the arrays were checked to be contiguous, of these sizes and kinds, and on this device;
            // those that are written overlap no other. On the CPU targets were checked.
            unsafe { params.run(call.device, self.input.kind) }
        })
    }
}

/// The classes of rows: 64-bit integers, or pairs of 32-bit integers, which are the lower and the upper half of
/// one. Callers make the latter who have no 64-bit integers.
fn targets<'a>(call: &mut Call<'a>, argument: Argument<'a>, rows: i64) -> Result<Array<'a>> {
    let array = call.strided(argument)?.contiguous()?;
    if array.is_of(0, 32) || array.is_of(1, 32) {
        if array.address.addr() % 8 != 0 && rows > 0 {
            return Err(array.refuse(
                "an address that is a multiple of 8",
                array.address.addr(),
                "copy it",
            ));
        }
        if array.shape != [rows, 2] {
            let expected = format!("int64 of shape [{rows}], or int32 of shape [{rows}, 2]");
            let got = format!("int32 of shape {:?}", array.shape);
            return Err(array.refuse(expected, got, "convert it to int64"));
        }
        return Ok(array);
    }
    if !array.is_of(0, 64) {
        return Err(array.wrong_type("int64, or int32 of shape [M, 2]"));
    }
    array.of_shape(&[rows])
}

pub fn cross_entropy([loss, grad_input, workspace, reads @ ..]: [Argument<'_>; 9]) -> Answer {
    let (mut call, of) = Reads::of(reads)?;
    let (kind, compute) = (of.input.kind, compute_kind(of.input.kind));
    let loss = match of.reduction {
        Reduction::None => call.written(loss, of.leading, &[compute])?,
        _ => call.number(loss, true, &[kind, compute])?,
    };
    let grad_input = call.may_be_written(grad_input, of.input.array.shape, &[kind])?;
    let mut workspace = call.workspace(workspace)?;
    call.check_overlaps()?;
    of.check_targets(call.device)?;
    let mut params = of.params();
    of.scratch(&mut params, &mut workspace)?;
    params.gradients = address(grad_input);
    if of.reduction == Reduction::None {
        params.losses = loss.array.address;
    } else {
        params.losses = workspace.take(bytes_of_losses(of.sizes[0], kind), GIVES_SIZE)?;
        params.total = loss.array.address;
        params.wide_total = (loss.kind != kind).into();
    }
    of.run(&call, params)?;
    Ok(None)
}

pub fn cross_entropy_backward(
    [grad_input, workspace, grad_output, reads @ ..]: [Argument<'_>; 9],
) -> Answer {
    let (mut call, of) = Reads::of(reads)?;
    let (kind, compute) = (of.input.kind, compute_kind(of.input.kind));
    let grad_output = match of.reduction {
        Reduction::None => call.read(grad_output, of.leading, &[kind, compute])?,
        _ => call.number(grad_output, false, &[kind, compute])?,
    };
    let grad_input = call.written(grad_input, of.input.array.shape, &[kind])?;
    let mut workspace = call.workspace(workspace)?;
    call.check_overlaps()?;
    of.check_targets(call.device)?;
    let mut params = of.params();
    of.scratch(&mut params, &mut workspace)?;
    params.gradients = grad_input.array.address;
    params.grads = grad_output.array.address;
    params.wide_grads = (grad_output.kind != kind).into();
    params.grad_stride = i64::from(of.reduction == Reduction::None && of.sizes[0] != 1);
    of.run(&call, params)?;
    Ok(None)
}

fn bytes_of_losses(rows: i64, kind: Kind) -> Option<i64> {
    rows.checked_mul(compute_kind(kind).elt_size_in_bytes() as i64)
}

pub fn cross_entropy_workspace([rows, dtype]: [Argument<'_>; 2]) -> Answer {
    let losses = bytes_of_losses(rows.integer(0)?, dtype.kind()?);
    workspace_bytes(GIVES_SIZE, &[Some(8), Some(8), losses]).map(Some)
}
