//! Calls of the kernels of rows that are sums, with tensors.

use super::{Moments, Shape, compute_kind, on};
use crate::ffi::facts::empty_of;
#[cfg(tch_extension_cuda)]
use crate::ffi::take_message;
use crate::ffi::{flat, optional_ptr};
use crate::operator::Borrowed;
use crate::ops::kinds;
#[cfg(tch_extension_cuda)]
use crate::ops::norm::kernels::add::tch_extension_norm_random;
use crate::ops::norm::kernels::add::{AddBackward, AddForward, AddKernels, AddOn, Random};
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The state of libtorch's generator for one kernel.
#[cfg(tch_extension_cuda)]
fn draw(device: Device) -> Result<Random> {
    let Device::Cuda(index) = device else { return Ok(Random::NONE) };
    let mut random = Random::NONE;
    // SAFETY: C++ writes the struct on success.
    match take_message(unsafe { tch_extension_norm_random(index as i32, &mut random) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(random),
    }
}

#[cfg(not(tch_extension_cuda))]
fn draw(_device: Device) -> Result<Random> {
    Ok(Random::NONE)
}

/// A state that a forward pass kept.
fn kept(state: &Tensor, device: Device) -> Result<Random> {
    let seed_at = state_ptr(Some(state), device)?.cast_const();
    Ok(Random { seed_at, offset_at: seed_at.wrapping_add(1), ..Random::NONE })
}

fn state_ptr(state: Option<&Tensor>, device: Device) -> Result<*mut i64> {
    Ok(optional_ptr("random state", state, &[2], (Kind::Int64, device))?.cast())
}

/// Dropout of the branch inside the kernels, which only CUDA's have.
#[derive(Clone, Copy)]
pub(crate) enum Dropout<'a> {
    None,
    /// Draws from libtorch's generator, and keeps its state, `[2]` of kind `Int64`.
    Draw {
        probability: f64,
        kept: Option<&'a Tensor>,
    },
    /// As the forward pass did that kept this state.
    Again {
        probability: f64,
        state: &'a Tensor,
    },
}

impl Dropout<'_> {
    fn probability(self) -> f64 {
        match self {
            Dropout::None => 0.0,
            Dropout::Draw { probability, .. } | Dropout::Again { probability, .. } => probability,
        }
    }

    fn random(self, device: Device) -> Result<Random> {
        match self {
            Dropout::None => Ok(Random::NONE),
            Dropout::Draw { .. } => draw(device),
            Dropout::Again { state, .. } => kept(state, device),
        }
    }
}

/// The tensors that the forward reads. All are contiguous.
pub(crate) struct AddOperands<'a> {
    pub input: &'a Tensor,
    pub residual: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

/// What the backward reads.
pub(crate) struct AddSaved<'a> {
    pub sum: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub moments: Moments<Borrowed<'a>>,
}

/// The gradients that the backward computes. Nobody needs those that are absent.
#[derive(Default)]
pub(crate) struct AddGradients {
    pub input: Option<Tensor>,
    pub residual: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// The kinds of the branch and of the stream.
#[derive(Clone, Copy)]
pub(crate) struct AddKinds {
    pub branch: Kind,
    pub stream: Kind,
}

impl AddKinds {
    /// Whether one kernel computes rows of this shape, in arrays that libtorch allocated; also those of
    /// the backward pass, if there is to be one.
    pub fn are_one_kernel(self, shape: Shape, device: Device, has_backward: bool) -> Result<bool> {
        let of = self.on(shape, device, self.stream)?;
        of.is_one_kernel([shape.rows, shape.columns], has_backward)
    }

    fn on(self, shape: Shape, device: Device, parameters: Kind) -> Result<AddOn> {
        let on = on(shape.way, (self.branch, device), parameters)?;
        Ok(AddOn { on, stream: kinds::Kind::of(self.stream)? })
    }
}

fn unaligned() -> Error {
    Error::msg("internal error: a sum has rows that are not aligned")
}

impl AddKernels {
    /// Computes sum and output ([M, N]) and, where there is room for them, the moments of each row.
    pub fn forward(
        &self,
        shape: Shape,
        operands: &AddOperands<'_>,
        (eps, dropout): (f64, Dropout<'_>),
        [sum, output]: [&mut Tensor; 2],
        moments: &Moments<Borrowed<'_>>,
    ) -> Result<()> {
        let Shape { rows, columns, .. } = shape;
        let device = operands.input.device();
        let kinds =
            AddKinds { branch: operands.input.f_kind()?, stream: operands.residual.f_kind()? };
        let parameter = operands.weight.or(operands.bias).unwrap_or(operands.residual).f_kind()?;
        let (branch, stream) = ((kinds.branch, device), (kinds.stream, device));
        let compute = (compute_kind(kinds.branch), device);
        let elements = rows * columns;
        let kept = if let Dropout::Draw { kept, .. } = dropout { kept } else { None };
        let of = kinds.on(shape, device, parameter)?;
        let mut params = AddForward {
            dropout: dropout.probability(),
            input: flat("input", Some(operands.input), elements, branch)?,
            residual: flat("residual", Some(operands.residual), elements, stream)?,
            weight: flat("weight", operands.weight, columns, (parameter, device))?,
            bias: flat("bias", operands.bias, columns, (parameter, device))?,
            sum: flat("sum", Some(sum), elements, stream)?,
            output: flat("output", Some(output), elements, branch)?,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            kept_state: state_ptr(kept, device)?,
            ..AddForward::new([rows, columns], eps)
        };
        if !params.plan(of)? {
            return Err(unaligned());
        }
        params.random = dropout.random(device)?;
        // SAFETY: `flat` and `optional_ptr` checked that the arrays are contiguous, of these sizes and
        // kinds, and on this device. Those that are written are borrowed exclusively, or were made for
        // this call, so they overlap no other.
        unsafe { (self.forward)(of.on.device, &params) }
    }

    /// Computes the gradients that are present.
    pub fn backward(
        &self,
        shape: Shape,
        saved: &AddSaved<'_>,
        (grad_output, grad_sum): (&Tensor, Option<&Tensor>),
        dropout: Dropout<'_>,
        gradients: &mut AddGradients,
    ) -> Result<()> {
        let Shape { rows, columns, .. } = shape;
        let device = saved.sum.device();
        let kinds = AddKinds { branch: grad_output.f_kind()?, stream: saved.sum.f_kind()? };
        let of_parameters = [gradients.weight.as_ref(), gradients.bias.as_ref()];
        let parameter = match saved.weight.or(of_parameters[0]).or(of_parameters[1]) {
            Some(parameter) => parameter.f_kind()?,
            None => kinds.stream,
        };
        let (branch, stream) = ((kinds.branch, device), (kinds.stream, device));
        let compute = (compute_kind(kinds.branch), device);
        let elements = rows * columns;
        let of = kinds.on(shape, device, parameter)?;
        let moments = &saved.moments;
        self.norm.check_moments(moments)?;
        let mut params = AddBackward {
            dropout: dropout.probability(),
            random: dropout.random(device)?,
            sum: flat("sum", Some(saved.sum), elements, stream)?,
            grad_output: flat("grad_output", Some(grad_output), elements, branch)?,
            grad_sum: flat("grad_sum", grad_sum, elements, stream)?,
            weight: flat("weight", saved.weight, columns, (parameter, device))?,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            grad_residual: flat("grad_residual", gradients.residual.as_ref(), elements, stream)?,
            grad_input: flat("grad_input", gradients.input.as_ref(), elements, branch)?,
            ..AddBackward::new([rows, columns])
        };
        if !params.plan(of)? {
            return Err(unaligned());
        }
        let size = [params.parts, columns];
        let scratch =
            |gradient: Option<&Tensor>| gradient.map(|_| empty_of(&size, compute)).transpose();
        let [weight_parts, bias_parts] = [scratch(of_parameters[0])?, scratch(of_parameters[1])?];
        params.weight_parts = optional_ptr("weight_parts", weight_parts.as_ref(), &size, compute)?;
        params.bias_parts = optional_ptr("bias_parts", bias_parts.as_ref(), &size, compute)?;
        let result = |name, tensor| flat(name, tensor, columns, (parameter, device));
        let sums =
            [result("grad_weight", of_parameters[0])?, result("grad_bias", of_parameters[1])?];
        // SAFETY: as in `forward`; the scratch tensors live until both kernels have been launched.
        unsafe { self.run_backward(of, &params, sums) }
    }
}
