//! Calls of the kernels of `csrc/norm`, which each operator instantiates for its statistic.

pub(in crate::ops) mod add;

use super::plan::{Gpu, Plan, Rows, Way};
#[cfg(tch_extension_cuda)]
use crate::cuda::per_device::{PerDevice, constant};
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::ffi::{flat, kind_code, optional_ptr};
use crate::operator::{Borrowed, Each, Meta};
use crate::ops::kinds;
use crate::{Error, Result};
#[cfg(tch_extension_cuda)]
use std::ffi::c_char;
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// What plans need to know about the device. It is all zeros on the CPU, whose kernels ignore
/// plans.
fn gpu(device: Device) -> Result<Gpu> {
    #[cfg(tch_extension_cuda)]
    {
        static KNOWN: PerDevice<Gpu> = PerDevice::new();
        // SAFETY: the C side fills the struct, and returns null or a pointer to a constant string.
        KNOWN.of("norm", device, |index, gpu| unsafe {
            constant(tch_extension_norm_device_cuda(index, gpu))
        })
    }
    #[cfg(not(tch_extension_cuda))]
    {
        let _ = device;
        Ok(Gpu::default())
    }
}

/// The parameters of the forward kernels. All arrays are row-major and contiguous, and no two
/// overlap.
#[repr(C)]
pub(crate) struct Forward {
    /// M, the number of rows.
    rows: i64,
    /// N, the number of columns.
    columns: i64,
    eps: f64,
    /// The `TchExtensionKind` of input and output.
    kind: i32,
    /// The kind of weight and bias: `kind`, or on the CPU Float with an input of a half kind.
    parameter_kind: i32,
    /// How rows are spread over threads; the CPU ignores it.
    plan: Plan,
    /// `[M, N]`.
    input: *const c_void,
    /// `[N]`, null for ones.
    weight: *const c_void,
    /// `[N]`, null for zeros.
    bias: *const c_void,
    /// `[M, N]`.
    output: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it or the statistic has no mean.
    mean: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    rstd: *mut c_void,
}

/// The parameters of the backward kernels. All arrays are row-major and contiguous, and no two
/// overlap.
#[repr(C)]
pub(crate) struct Backward {
    /// M, the number of rows.
    rows: i64,
    /// N, the number of columns.
    columns: i64,
    /// P: the sums over rows, for weight and bias, are cut into this many parts.
    parts: i64,
    /// The `TchExtensionKind` of input, output and their gradients.
    kind: i32,
    /// The kind of weight and bias.
    parameter_kind: i32,
    /// How rows are spread over threads; the CPU ignores it.
    plan: Plan,
    /// `[M, N]`.
    grad_output: *const c_void,
    /// `[M, N]`.
    input: *const c_void,
    /// `[N]`, null for ones.
    weight: *const c_void,
    /// `[M]` of the compute kind; null if the statistic has no mean. Both mean and rstd are null
    /// when only the bias' gradient is wanted.
    mean: *const c_void,
    /// `[M]` of the compute kind.
    rstd: *const c_void,
    /// `[M, N]`, null when nobody needs it.
    grad_input: *mut c_void,
    /// `[N]` of the parameter kind, null when nobody needs it.
    grad_weight: *mut c_void,
    /// `[N]` of the parameter kind, null when nobody needs it.
    grad_bias: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without grad_weight.
    weight_parts: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without grad_bias.
    bias_parts: *mut c_void,
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_norm_device_cuda(device: i32, result: *mut Gpu) -> *const c_char;
}

/// An operator's kernels. The functions are unsafe because the parameters' addresses must belong to
/// arrays of the stated sizes and kinds on the device.
pub(crate) struct Kernels {
    pub op: &'static str,
    /// Whether the statistic has a mean.
    pub is_centred: bool,
    /// Computes the output and the moments.
    pub forward: unsafe fn(Device, &Forward) -> Result<()>,
    /// Computes the gradient of the input, and for weight and bias the partial sums or the whole
    /// gradients.
    pub backward: unsafe fn(Device, &Backward) -> Result<()>,
    /// Computes the gradients of weight and bias, from their partial sums or directly by columns.
    pub finish: unsafe fn(Device, &Backward) -> Result<()>,
    /// Tells how many clusters of a plan the current device runs at a time.
    #[cfg(tch_extension_cuda)]
    pub clusters: unsafe extern "C" fn(*const Plan, i32) -> i64,
}

/// The kind in which values of this kind are computed: the kind of mean and rstd.
pub(crate) fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// The numbers of rows and columns, and the way to compute them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    pub rows: i64,
    pub columns: i64,
    pub way: Way,
}

impl Shape {
    /// Of rows whose size has so many dimensions at the end of these sizes.
    pub fn new(sizes: &[i64], dims: usize, way: Way) -> Self {
        let (leading, columns) = sizes.split_at(sizes.len().saturating_sub(dims));
        let product = |sizes: &[i64]| sizes.iter().copied().fold(1, i64::saturating_mul);
        Shape { rows: product(leading), columns: product(columns), way }
    }
}

/// The tensors that the forward reads, of the shapes that [`Forward`] states.
pub(crate) struct Operands<'a> {
    pub input: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

/// What the backward reads.
pub(crate) struct Saved<'a> {
    /// Absent, as are the others, if only the bias' gradient is wanted.
    pub input: Option<&'a Tensor>,
    pub weight: Option<&'a Tensor>,
    pub moments: Moments<Borrowed<'a>>,
}

crate::slots! {
    /// What the forward computes of each row for the backward, `[M]` each, of [`compute_kind`]: the mean, if
    /// the statistic has one, and 1/√(variance + eps) or 1/√(mean square + eps).
    pub struct Moments { mean?, rstd? }
}

impl Moments<Each<Option<Tensor>>> {
    pub fn borrowed(&self) -> Moments<Borrowed<'_>> {
        Moments { mean: self.mean.as_ref(), rstd: self.rstd.as_ref() }
    }
}

/// The code of the kind of weight and bias, which is that of the rows or, on the CPU, the one that is
/// computed in.
fn parameter_code(parameters: Kind, rows: Kind, device: Device) -> Result<i32> {
    if parameters != rows && (device != Device::Cpu || parameters != compute_kind(rows)) {
        return Err(Error::msg("internal error: weight and bias have another kind than the rows"));
    }
    kind_code(parameters)
}

/// The alignment that all addresses have, in bytes: a power of two, at most 16.
fn alignment(pointers: &[*const c_void]) -> i64 {
    let all_at = |bytes: usize| pointers.iter().all(|pointer| pointer.addr() % bytes == 0);
    [16, 8, 4, 2].into_iter().find(|&bytes| all_at(bytes)).unwrap_or(1) as i64
}

/// Partial sums, and the gradients that they become: of weight and bias.
struct Sums<'a> {
    rows: i64,
    columns: i64,
    parts: i64,
    plan: Plan,
    parts_of: [Option<&'a Tensor>; 2],
    gradients: [Option<&'a Tensor>; 2],
}

impl Kernels {
    /// Computes `output` ([M, N]) and, where there is room for them, the moments of each row.
    pub fn forward(
        &self,
        shape: Shape,
        operands: &Operands<'_>,
        eps: f64,
        output: &mut Tensor,
        moments: &Moments<Borrowed<'_>>,
    ) -> Result<()> {
        let Shape { rows, columns, way } = shape;
        let values = plain(operands.input)?;
        let weight = operands.weight.map(plain).transpose()?;
        let bias = operands.bias.map(plain).transpose()?;
        let like = (values.f_kind()?, values.device());
        let parameter = weight.as_ref().or(bias.as_ref()).unwrap_or(&values);
        let parameters = (parameter.f_kind()?, like.1);
        let elements = rows * columns;
        let compute = (compute_kind(like.0), like.1);
        let input = flat("input", Some(&values), elements, like)?;
        let weight = flat("weight", weight.as_ref(), columns, parameters)?;
        let bias = flat("bias", bias.as_ref(), columns, parameters)?;
        let output = flat("output", Some(output), elements, like)?;
        let alignment = alignment(&[input, weight, bias, output]);
        let (kind, gpu) = (like.0, gpu(like.1)?);
        let kind = kinds::Kind::of(kind)?;
        let rows_of = Rows { way, rows, columns, kind, alignment, has_sums: false, gpu };
        let params = Forward {
            rows,
            columns,
            eps,
            kind: kind_code(like.0)?,
            parameter_kind: parameter_code(parameters.0, like.0, like.1)?,
            plan: rows_of.forward(),
            input,
            weight,
            bias,
            output,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
        };
        // SAFETY: `flat` and `optional_ptr` checked that the arrays are contiguous, of these sizes and
        // kinds, and on this device. Those that are written are borrowed exclusively, or were made for
        // this call, so they overlap no other.
        unsafe { (self.forward)(like.1, &params) }
    }

    /// The gradients of input, weight and bias that are wanted, each described by its argument.
    pub fn backward(
        &self,
        shape: Shape,
        grad_output: &Tensor,
        saved: &Saved<'_>,
        wanted: [Option<&Meta<i64>>; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let Shape { rows, columns, way } = shape;
        let grad_output = plain(grad_output)?;
        // The bias' gradient is a sum of `grad_output` alone.
        let values = saved.input.map_or_else(|| Ok(grad_output.shallow_clone()), plain)?;
        let weight = saved.weight.map(plain).transpose()?;
        let moments = match saved.input {
            Some(_) => saved.moments.clone(),
            None => Moments { mean: None, rstd: None },
        };
        if wanted[0].or(wanted[1]).is_some() {
            self.check_moments(&moments)?;
        }
        let [of_input, of_weight, of_bias] =
            wanted.map(|like| like.map(Meta::allocate).transpose());
        let gradients = [of_input?, of_weight?, of_bias?];
        let [of_input, of_weight, of_bias] = gradients.each_ref().map(Option::as_ref);
        let like = (values.f_kind()?, values.device());
        let parameter = of_weight.or(of_bias).or(weight.as_ref()).unwrap_or(&values);
        let parameters = (parameter.f_kind()?, like.1);
        let elements = rows * columns;
        let compute = (compute_kind(like.0), like.1);
        let grad_output = flat("grad_output", Some(&grad_output), elements, like)?;
        let input = flat("input", Some(&values), elements, like)?;
        let weight = flat("weight", weight.as_ref(), columns, parameters)?;
        let grad_input = flat("grad_input", of_input, elements, like)?;
        let alignment = alignment(&[grad_output, input, weight, grad_input]);
        let has_sums = of_weight.or(of_bias).is_some();
        let (kind, gpu) = (like.0, gpu(like.1)?);
        let kind = kinds::Kind::of(kind)?;
        let rows_of = Rows { way, rows, columns, kind, alignment, has_sums, gpu };
        let plan = rows_of.backward();
        // dw and db are computed directly, by columns.
        let by_columns = matches!(plan.way, Way::Few | Way::FewPasses);
        let is_one_kernel = plan.way == Way::Few;
        let parts =
            rows_of.parts(&plan, like.1.into(), self.clusters_at_a_time(&plan, like.0, like.1)?);
        let scratch = |gradient: Option<&Tensor>| {
            let gradient = gradient.filter(|_| !by_columns);
            gradient.map(|_| empty_of(&[parts, columns], compute)).transpose()
        };
        let (weight_parts, bias_parts) = (scratch(of_weight)?, scratch(of_bias)?);
        let params = Backward {
            rows,
            columns,
            parts,
            kind: kind_code(like.0)?,
            parameter_kind: parameter_code(parameters.0, like.0, like.1)?,
            plan,
            grad_output,
            input,
            weight,
            mean: optional_ptr("mean", moments.mean, &[rows], compute)?,
            rstd: optional_ptr("rstd", moments.rstd, &[rows], compute)?,
            grad_input,
            grad_weight: flat("grad_weight", of_weight, columns, parameters)?,
            grad_bias: flat("grad_bias", of_bias, columns, parameters)?,
            weight_parts: optional_ptr(
                "weight_parts",
                weight_parts.as_ref(),
                &[parts, columns],
                compute,
            )?,
            bias_parts: optional_ptr(
                "bias_parts",
                bias_parts.as_ref(),
                &[parts, columns],
                compute,
            )?,
        };
        let has_to_finish = has_sums && !is_one_kernel;
        // On CUDA the first kernel has nothing to do if only gradients of weight and bias are wanted,
        // and these are computed by columns.
        let is_first_needed =
            like.1 == Device::Cpu || !by_columns || is_one_kernel || !grad_input.is_null();
        if is_first_needed {
            // SAFETY: as in `forward`; the scratch tensors live until both kernels have been launched.
            unsafe { (self.backward)(like.1, &params)? };
        }
        if has_to_finish {
            // SAFETY: as above.
            unsafe { (self.finish)(like.1, &params)? };
        }
        Ok(gradients)
    }

    /// Checks that the moments are there.
    fn check_moments(&self, moments: &Moments<Borrowed<'_>>) -> Result<()> {
        if moments.rstd.is_some() && (moments.mean.is_some() || !self.is_centred) {
            return Ok(());
        }
        Err(Error::msg(format!("internal error: {}'s backward has no moments", self.op)))
    }

    /// Adds up partial sums that another kernel left, `[P, N]` each of the compute kind.
    fn finish_sums(&self, device: Device, sums: &Sums<'_>) -> Result<()> {
        let gradient = sums.gradients.iter().flatten().next();
        let Some(kind) = gradient.map(|gradient| gradient.f_kind()).transpose()? else {
            return Ok(());
        };
        let Sums { parts, columns, plan, .. } = *sums;
        let [grad_weight, grad_bias] = sums.gradients;
        let [weight_parts, bias_parts] = sums.parts_of;
        let result = |name, tensor| flat(name, tensor, columns, (kind, device));
        let scratch = |name, tensor| {
            optional_ptr(name, tensor, &[parts, columns], (compute_kind(kind), device))
        };
        let null = std::ptr::null;
        let params = Backward {
            rows: sums.rows,
            columns,
            parts,
            kind: kind_code(kind)?,
            parameter_kind: kind_code(kind)?,
            plan,
            grad_output: null(),
            input: null(),
            weight: null(),
            mean: null(),
            rstd: null(),
            grad_input: std::ptr::null_mut(),
            grad_weight: result("grad_weight", grad_weight)?,
            grad_bias: result("grad_bias", grad_bias)?,
            weight_parts: scratch("weight_parts", weight_parts)?,
            bias_parts: scratch("bias_parts", bias_parts)?,
        };
        // SAFETY: as in `forward`; this kernel reads only the partial sums.
        unsafe { (self.finish)(device, &params) }
    }

    /// How many clusters of this plan's blocks run at the same time; 0 if the plan has no clusters.
    fn clusters_at_a_time(&self, plan: &Plan, kind: Kind, device: Device) -> Result<i64> {
        #[cfg(tch_extension_cuda)]
        if plan.cluster > 1 {
            let _guard = crate::cuda::DeviceGuard::new(device)?;
            // SAFETY: the C side only reads the struct.
            return Ok(unsafe { (self.clusters)(plan, kind_code(kind)?) });
        }
        let _ = (plan, kind, device);
        Ok(0)
    }
}
