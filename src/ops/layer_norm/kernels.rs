//! The kernels of `csrc/layer_norm`.

use super::plan::{Gpu, Plan, Rows, Way};
use crate::Result;
#[cfg(tch_extension_cuda)]
use crate::ffi::once_a_device::{OnceADevice, constant};
use crate::ffi::{kind_code, optional_ptr};
use crate::kernels::raw_kernels;
#[cfg(tch_extension_cuda)]
use std::ffi::c_char;
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// What plans ask of the device. Nothing on the CPU, whose kernels look at no plan.
fn gpu(device: Device) -> Result<Gpu> {
    #[cfg(tch_extension_cuda)]
    {
        static KNOWN: OnceADevice<Gpu> = OnceADevice::new();
        // SAFETY: the C side fills the struct, and returns null or a constant text.
        KNOWN.of("layer_norm", device, |index, gpu| unsafe {
            constant(tch_extension_layer_norm_device(index, gpu))
        })
    }
    #[cfg(not(tch_extension_cuda))]
    {
        let _ = device;
        Ok(Gpu::default())
    }
}

/// How many clusters of such blocks run at a time.
fn clusters_at_a_time(plan: &Plan, kind: Kind, device: Device) -> Result<i64> {
    #[cfg(tch_extension_cuda)]
    if plan.cluster > 1 {
        let _guard = crate::cuda::DeviceGuard::new(device)?;
        // SAFETY: the C side only reads the struct.
        return Ok(unsafe { tch_extension_layer_norm_clusters(plan, kind_code(kind)?) });
    }
    let _ = (plan, kind, device);
    Ok(0)
}

/// What the forward kernels get. All arrays are row-major and contiguous, and no two overlap.
#[repr(C)]
struct Forward {
    /// M.
    rows: i64,
    /// N.
    columns: i64,
    eps: f64,
    /// `TchExtensionKind` of input and output.
    kind: i32,
    /// Of weight and bias: `kind`, or Float with an input of a half kind (CPU only).
    parameter_kind: i32,
    /// The CPU ignores it.
    plan: Plan,
    /// `[M, N]`.
    input: *const c_void,
    /// `[N]`, null for ones.
    weight: *const c_void,
    /// `[N]`, null for zeros.
    bias: *const c_void,
    /// `[M, N]`.
    output: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    mean: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    rstd: *mut c_void,
}

/// What the backward kernels get. All arrays are row-major and contiguous, and no two overlap.
#[repr(C)]
struct Backward {
    /// M.
    rows: i64,
    /// N.
    columns: i64,
    /// P: the sums over rows for weight and bias are cut into this many parts.
    parts: i64,
    /// `TchExtensionKind` of input, output and their gradients.
    kind: i32,
    /// Of weight and bias.
    parameter_kind: i32,
    /// The CPU ignores it.
    plan: Plan,
    /// `[M, N]`.
    grad_output: *const c_void,
    /// `[M, N]`.
    input: *const c_void,
    /// `[N]`, null for ones.
    weight: *const c_void,
    /// `[M]` of the compute kind. It and rstd are null when only the bias' gradient is wanted.
    mean: *const c_void,
    /// `[M]` of the compute kind.
    rstd: *const c_void,
    /// `[M, N]`, null when nobody needs it.
    grad_input: *mut c_void,
    /// `[N]` of the parameter kind, null when nobody needs it.
    grad_weight: *mut c_void,
    /// `[N]` of the parameter kind, null when nobody needs it.
    grad_bias: *mut c_void,
    /// `[P, N]` of the compute kind: scratch, null without grad_weight.
    weight_parts: *mut c_void,
    /// `[P, N]` of the compute kind: scratch, null without grad_bias.
    bias_parts: *mut c_void,
}

raw_kernels! {
    "layer_norm";
    /// Output and moments.
    fn run_forward(Forward) =
        tch_extension_layer_norm_forward_cpu, tch_extension_layer_norm_forward_cuda;
    /// The gradient of the input, and the parts of the others or all of them.
    fn run_backward(Backward) =
        tch_extension_layer_norm_backward_cpu, tch_extension_layer_norm_backward_cuda;
    /// The gradients of weight and bias, from their parts or by columns.
    fn run_finish(Backward) =
        tch_extension_layer_norm_finish_cpu, tch_extension_layer_norm_finish_cuda;
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_layer_norm_device(device: i32, result: *mut Gpu) -> *const c_char;
    fn tch_extension_layer_norm_clusters(plan: *const Plan, kind: i32) -> i64;
}

/// What values of this kind are computed in: the kind of mean and rstd.
pub(crate) fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Rows, columns, and what the derivative keeps of each row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub rows: i64,
    pub columns: i64,
    pub way: Way,
}

/// What both directions read; all contiguous, and of the shapes that `layer_norm.h` states.
pub(crate) struct Operands<'a> {
    pub input: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

impl Operands<'_> {
    fn like(&self) -> Result<(Kind, Device)> {
        Ok((self.input.f_kind()?, self.input.device()))
    }

    /// The kind of weight and bias.
    fn parameters_like(&self) -> Result<(Kind, Device)> {
        let parameter = self.weight.or(self.bias).unwrap_or(self.input);
        Ok((parameter.f_kind()?, self.input.device()))
    }
}

/// `[M]` each, of [`compute_kind`].
pub(crate) struct Moments {
    pub mean: Tensor,
    pub rstd: Tensor,
}

impl Moments {
    pub fn empty(rows: i64, kind: Kind, device: Device) -> Result<Self> {
        let empty = || Tensor::f_empty([rows], (compute_kind(kind), device));
        Ok(Moments { mean: empty()?, rstd: empty()? })
    }
}

/// [`optional_ptr`] for an array of which only the number of elements counts.
fn flat(
    name: &str,
    tensor: Option<&Tensor>,
    numel: i64,
    like: (Kind, Device),
) -> Result<*mut c_void> {
    let size = tensor.map(Tensor::size).unwrap_or_default();
    let found = size.iter().try_fold(1_i64, |product, &size| product.checked_mul(size));
    let shape = if found == Some(numel) { size } else { vec![numel] };
    optional_ptr(name, tensor, &shape, like)
}

/// Of how many bytes, at most 16, all addresses are multiples.
fn alignment(pointers: &[*const c_void]) -> i64 {
    let all_at = |bytes: usize| pointers.iter().all(|pointer| pointer.addr() % bytes == 0);
    [16, 8, 4, 2].into_iter().find(|&bytes| all_at(bytes)).unwrap_or(1) as i64
}

/// Computes `output` ([M, N]) and, where asked for, the rows' moments.
pub(crate) fn forward(
    shape: Shape,
    operands: &Operands<'_>,
    eps: f64,
    output: &mut Tensor,
    moments: Option<&mut Moments>,
) -> Result<()> {
    let Shape { rows, columns, way } = shape;
    let (like, parameters) = (operands.like()?, operands.parameters_like()?);
    let elements = rows * columns;
    let compute = (compute_kind(like.0), like.1);
    let (mean, rstd) = moments.map(|moments| (&moments.mean, &moments.rstd)).unzip();
    let input = flat("input", Some(operands.input), elements, like)?;
    let weight = flat("weight", operands.weight, columns, parameters)?;
    let bias = flat("bias", operands.bias, columns, parameters)?;
    let output = flat("output", Some(output), elements, like)?;
    let alignment = alignment(&[input, weight, bias, output]);
    let rows_of = Rows { way, rows, columns, kind: like.0, alignment, gpu: gpu(like.1)? };
    let params = Forward {
        rows,
        columns,
        eps,
        kind: kind_code(like.0)?,
        parameter_kind: kind_code(parameters.0)?,
        plan: rows_of.forward(),
        input,
        weight,
        bias,
        output,
        mean: optional_ptr("mean", mean, &[rows], compute)?,
        rstd: optional_ptr("rstd", rstd, &[rows], compute)?,
    };
    // SAFETY: the arrays were just checked to be contiguous, of these sizes and kinds, and on this
    // device; those that are written are exclusively borrowed, so they are none of the others.
    unsafe { run_forward(like.1, &params) }
}

/// What [`backward`] computes. Absent: nobody needs it.
#[derive(Default)]
pub(crate) struct Gradients {
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub bias: Option<Tensor>,
}

/// Computes the gradients that are there. The moments are needed for all but the bias'.
pub(crate) fn backward(
    shape: Shape,
    operands: &Operands<'_>,
    grad_output: &Tensor,
    moments: Option<&Moments>,
    gradients: &mut Gradients,
) -> Result<()> {
    let Shape { rows, columns, way } = shape;
    let (like, mut parameters) = (operands.like()?, operands.parameters_like()?);
    if let Some(gradient) = gradients.weight.as_ref().or(gradients.bias.as_ref()) {
        parameters.0 = gradient.f_kind()?;
    }
    let elements = rows * columns;
    let compute = (compute_kind(like.0), like.1);
    let (mean, rstd) = moments.map(|moments| (&moments.mean, &moments.rstd)).unzip();
    if moments.is_none() && (gradients.input.is_some() || gradients.weight.is_some()) {
        return Err(crate::Error::msg("internal error: layer_norm's backward has no moments"));
    }
    let grad_output = flat("grad_output", Some(grad_output), elements, like)?;
    let input = flat("input", Some(operands.input), elements, like)?;
    let weight = flat("weight", operands.weight, columns, parameters)?;
    let grad_input = flat("grad_input", gradients.input.as_ref(), elements, like)?;
    let alignment = alignment(&[grad_output, input, weight, grad_input]);
    let rows_of = Rows { way, rows, columns, kind: like.0, alignment, gpu: gpu(like.1)? };
    let plan = rows_of.backward();
    let by_columns = plan.by_columns == 1;
    let is_one_kernel = by_columns && plan.in_registers == 1;
    let parts = rows_of.parts(&plan, like.1, clusters_at_a_time(&plan, like.0, like.1)?);
    let scratch = |gradient: &Option<Tensor>| -> Result<Option<Tensor>> {
        gradient
            .as_ref()
            .filter(|_| !by_columns)
            .map(|_| Ok(Tensor::f_empty([parts, columns], compute)?))
            .transpose()
    };
    let (weight_parts, bias_parts) = (scratch(&gradients.weight)?, scratch(&gradients.bias)?);
    let params = Backward {
        rows,
        columns,
        parts,
        kind: kind_code(like.0)?,
        parameter_kind: kind_code(parameters.0)?,
        plan,
        grad_output,
        input,
        weight,
        mean: optional_ptr("mean", mean, &[rows], compute)?,
        rstd: optional_ptr("rstd", rstd, &[rows], compute)?,
        grad_input,
        grad_weight: flat("grad_weight", gradients.weight.as_ref(), columns, parameters)?,
        grad_bias: flat("grad_bias", gradients.bias.as_ref(), columns, parameters)?,
        weight_parts: optional_ptr(
            "weight_parts",
            weight_parts.as_ref(),
            &[parts, columns],
            compute,
        )?,
        bias_parts: optional_ptr("bias_parts", bias_parts.as_ref(), &[parts, columns], compute)?,
    };
    let has_sums = gradients.weight.is_some() || gradients.bias.is_some();
    let has_to_finish = has_sums && !is_one_kernel;
    // On CUDA the first kernel has nothing to do where only sums by columns are wanted.
    let is_first_needed =
        like.1 == Device::Cpu || !by_columns || is_one_kernel || !grad_input.is_null();
    if is_first_needed {
        // SAFETY: as in `forward`; the scratch lives until both kernels have been started.
        unsafe { run_backward(like.1, &params)? };
    }
    if has_to_finish {
        // SAFETY: as above.
        unsafe { run_finish(like.1, &params)? };
    }
    Ok(())
}
