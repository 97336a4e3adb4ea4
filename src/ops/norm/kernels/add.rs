//! Calls of the kernels of rows that are sums: h = x + residual and y = norm(h).

use super::{Kernels, Moments, Shape, Sums, alignment, compute_kind, flat, gpu, parameter_code};
use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::{kind_code, optional_ptr};
use crate::operator::Borrowed;
use crate::ops::kinds;
use crate::ops::norm::plan::{Plan, Rows};
#[cfg(tch_extension_cuda)]
use crate::{Error, ffi::take_message};
#[cfg(tch_extension_cuda)]
use std::ffi::c_char;
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// The state of libtorch's random generator on CUDA.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Random {
    /// The seed, unless it is in memory.
    seed: u64,
    /// How many numbers were drawn; in addition to those in memory, if there are any.
    offset: u64,
    /// On the device; null if the seed is above.
    seed_at: *const i64,
    /// On the device; null if all is above.
    offset_at: *const i64,
}

/// The parameters of the forward kernels of rows that are sums. All arrays are row-major and
/// contiguous, and no two overlap.
#[repr(C)]
pub(crate) struct AddForward {
    /// M, the number of rows.
    rows: i64,
    /// N, the number of columns.
    columns: i64,
    eps: f64,
    /// The probability that a value of the input is dropped. The CPU's kernels know no dropout.
    dropout: f64,
    /// The `TchExtensionKind` of input and output.
    kind: i32,
    /// The kind of residual and sum: `kind`, or Float with an input of a half kind.
    stream_kind: i32,
    /// The kind of weight and bias: `stream_kind`, or on the CPU Float with an input of a half kind.
    parameter_kind: i32,
    reserved: i32,
    /// How rows are spread over threads; the CPU ignores it.
    plan: Plan,
    /// Read only with dropout.
    random: Random,
    /// `[M, N]`.
    input: *const c_void,
    /// `[M, N]`.
    residual: *const c_void,
    /// `[N]`, null for ones.
    weight: *const c_void,
    /// `[N]`, null for zeros.
    bias: *const c_void,
    /// `[M, N]`.
    sum: *mut c_void,
    /// `[M, N]`.
    output: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it or the statistic has no mean.
    mean: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    rstd: *mut c_void,
    /// `[2]`: where the kernel leaves the generator's seed and offset; null when nobody needs them.
    kept_state: *mut i64,
}

/// The parameters of the backward kernels of rows that are sums. All arrays are row-major and
/// contiguous, and no two overlap.
#[repr(C)]
pub(crate) struct AddBackward {
    /// M, the number of rows.
    rows: i64,
    /// N, the number of columns.
    columns: i64,
    /// P: the sums over rows, for weight and bias, are cut into this many parts.
    parts: i64,
    /// The probability that a value of the input was dropped. The CPU's kernels know no dropout.
    dropout: f64,
    /// The `TchExtensionKind` of the output, of its gradient and of the input's.
    kind: i32,
    /// The kind of the sum, of its gradient and of the residual's.
    stream_kind: i32,
    /// The kind of weight and bias.
    parameter_kind: i32,
    reserved: i32,
    /// How rows are spread over threads; the CPU ignores it.
    plan: Plan,
    /// The state that the forward pass kept. Read only with dropout.
    random: Random,
    /// `[M, N]`.
    grad_output: *const c_void,
    /// `[M, N]`, null for zeros.
    grad_sum: *const c_void,
    /// `[M, N]`.
    sum: *const c_void,
    /// `[N]`, null for ones.
    weight: *const c_void,
    /// `[M]` of the compute kind; null if the statistic has no mean.
    mean: *const c_void,
    /// `[M]` of the compute kind.
    rstd: *const c_void,
    /// `[M, N]`, null when nobody needs it.
    grad_residual: *mut c_void,
    /// `[M, N]`, null when nobody needs it or it is the residual's.
    grad_input: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without a gradient of the weight.
    weight_parts: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without a gradient of the bias.
    bias_parts: *mut c_void,
}

/// An operator's kernels of rows that are sums. The functions are unsafe because the parameters'
/// addresses must belong to arrays of the stated sizes and kinds on the device.
pub(crate) struct AddKernels {
    pub forward: unsafe fn(Device, &AddForward) -> Result<()>,
    pub backward: unsafe fn(Device, &AddBackward) -> Result<()>,
    /// The kernels of the same statistic for rows that are no sums.
    pub norm: Kernels,
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_norm_random(device: i32, result: *mut Random) -> *mut c_char;
}

impl Random {
    const NONE: Random =
        Random { seed: 0, offset: 0, seed_at: std::ptr::null(), offset_at: std::ptr::null() };

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
            Dropout::Draw { .. } => Random::draw(device),
            Dropout::Again { state, .. } => Random::kept(state, device),
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
        let rows_of = self.rows(shape, device, 16)?;
        let has_forward = || rows_of.forward_of_sum().is_some();
        let takes_backward = || rows_of.backward_of_sum(self.stream_bytes()).is_some();
        Ok(device == Device::Cpu || has_forward() && (!has_backward || takes_backward()))
    }

    fn stream_bytes(self) -> i64 {
        self.stream.elt_size_in_bytes() as i64
    }

    fn rows(self, shape: Shape, device: Device, alignment: i64) -> Result<Rows> {
        let Shape { rows, columns, way } = shape;
        let (kind, gpu) = (kinds::Kind::of(self.branch)?, gpu(device)?);
        Ok(Rows { way, rows, columns, kind, alignment, has_sums: true, gpu })
    }
}

/// The CPU ignores the plan.
fn plan_on(device: Device, plan: Option<Plan>) -> Result<Plan> {
    match plan {
        Some(plan) => Ok(plan),
        None if device == Device::Cpu => Ok(Plan::of_cpu()),
        None => Err(crate::Error::msg("internal error: a sum has rows that are not aligned")),
    }
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
        let input = flat("input", Some(operands.input), elements, branch)?;
        let residual = flat("residual", Some(operands.residual), elements, stream)?;
        let weight = flat("weight", operands.weight, columns, (parameter, device))?;
        let bias = flat("bias", operands.bias, columns, (parameter, device))?;
        let sum = flat("sum", Some(sum), elements, stream)?;
        let output = flat("output", Some(output), elements, branch)?;
        let alignment = alignment(&[input, residual, weight, bias, sum, output]);
        let kept = if let Dropout::Draw { kept, .. } = dropout { kept } else { None };
        let params = AddForward {
            rows,
            columns,
            eps,
            dropout: dropout.probability(),
            kind: kind_code(kinds.branch)?,
            stream_kind: kind_code(kinds.stream)?,
            parameter_kind: parameter_code(parameter, kinds.stream, device)?,
            reserved: 0,
            plan: plan_on(device, kinds.rows(shape, device, alignment)?.forward_of_sum())?,
            random: dropout.random(device)?,
            input,
            residual,
            weight,
            bias,
            sum,
            output,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            kept_state: state_ptr(kept, device)?,
        };
        // SAFETY: `flat` and `optional_ptr` checked that the arrays are contiguous, of these sizes and
        // kinds, and on this device. Those that are written are borrowed exclusively, or were made for
        // this call, so they overlap no other.
        unsafe { (self.forward)(device, &params) }
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
        let sum = flat("sum", Some(saved.sum), elements, stream)?;
        let grad_output = flat("grad_output", Some(grad_output), elements, branch)?;
        let grad_sum = flat("grad_sum", grad_sum, elements, stream)?;
        let weight = flat("weight", saved.weight, columns, (parameter, device))?;
        let grad_residual = flat("grad_residual", gradients.residual.as_ref(), elements, stream)?;
        let grad_input = flat("grad_input", gradients.input.as_ref(), elements, branch)?;
        let all = [sum, grad_output, grad_sum, weight, grad_residual, grad_input];
        let rows_of = kinds.rows(shape, device, alignment(&all.map(<*mut c_void>::cast_const)))?;
        let plan = plan_on(device, rows_of.backward_of_sum(kinds.stream_bytes()))?;
        let parts = rows_of.parts(&plan, device.into(), 0);
        let scratch = |gradient: Option<&Tensor>| {
            gradient.map(|_| empty_of(&[parts, columns], compute)).transpose()
        };
        let parts_of = [scratch(of_parameters[0])?, scratch(of_parameters[1])?];
        let part = |name, tensor: &Option<Tensor>| {
            optional_ptr(name, tensor.as_ref(), &[parts, columns], compute)
        };
        let moments = &saved.moments;
        self.norm.check_moments(moments)?;
        let params = AddBackward {
            rows,
            columns,
            parts,
            dropout: dropout.probability(),
            kind: kind_code(kinds.branch)?,
            stream_kind: kind_code(kinds.stream)?,
            parameter_kind: parameter_code(parameter, kinds.stream, device)?,
            reserved: 0,
            plan,
            random: dropout.random(device)?,
            grad_output,
            grad_sum,
            sum,
            weight,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            grad_residual,
            grad_input,
            weight_parts: part("weight_parts", &parts_of[0])?,
            bias_parts: part("bias_parts", &parts_of[1])?,
        };
        // SAFETY: as in `forward`; the scratch tensors live until both kernels have been launched.
        unsafe { (self.backward)(device, &params)? };
        let [weight_parts, bias_parts] = &parts_of;
        let parts_of = [weight_parts.as_ref(), bias_parts.as_ref()];
        let sums = Sums { rows, columns, parts, plan, parts_of, gradients: of_parameters };
        self.norm.finish_sums(device, &sums)
    }
}
