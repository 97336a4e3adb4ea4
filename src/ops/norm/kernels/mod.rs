//! Calls of the kernels of `csrc/norm`, which each operator instantiates for its statistic, by addresses
//! of arrays. Nothing here names tch, so that programs without it use it, too.

pub(crate) mod add;

#[cfg(tch_extension_cuda)]
use crate::cuda::per_device::{PerDevice, constant};
use crate::ops::kinds::{Device, Kind, compute_kind};
use crate::ops::norm::plan::{Gpu, Plan, Rows, Way};
use crate::{Error, Result};
#[cfg(tch_extension_cuda)]
use std::ffi::c_char;
use std::ffi::c_void;

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
    pub rows: i64,
    /// N, the number of columns.
    pub columns: i64,
    pub eps: f64,
    /// The `TchExtensionKind` of input and output.
    pub kind: i32,
    /// The kind of weight and bias: `kind`, or on the CPU Float with an input of a half kind.
    pub parameter_kind: i32,
    /// How rows are spread over threads; the CPU ignores it.
    pub plan: Plan,
    /// `[M, N]`.
    pub input: *const c_void,
    /// `[N]`, null for ones.
    pub weight: *const c_void,
    /// `[N]`, null for zeros.
    pub bias: *const c_void,
    /// `[M, N]`.
    pub output: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it or the statistic has no mean.
    pub mean: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    pub rstd: *mut c_void,
}

/// The parameters of the backward kernels. All arrays are row-major and contiguous, and no two
/// overlap.
#[repr(C)]
pub(crate) struct Backward {
    /// M, the number of rows.
    pub rows: i64,
    /// N, the number of columns.
    pub columns: i64,
    /// P: the sums over rows, for weight and bias, are cut into this many parts.
    pub parts: i64,
    /// The `TchExtensionKind` of input, output and their gradients.
    pub kind: i32,
    /// The kind of weight and bias.
    pub parameter_kind: i32,
    /// How rows are spread over threads; the CPU ignores it.
    pub plan: Plan,
    /// `[M, N]`.
    pub grad_output: *const c_void,
    /// `[M, N]`.
    pub input: *const c_void,
    /// `[N]`, null for ones.
    pub weight: *const c_void,
    /// `[M]` of the compute kind; null if the statistic has no mean. Both mean and rstd are null
    /// when only the bias' gradient is wanted.
    pub mean: *const c_void,
    /// `[M]` of the compute kind.
    pub rstd: *const c_void,
    /// `[M, N]`, null when nobody needs it.
    pub grad_input: *mut c_void,
    /// `[N]` of the parameter kind, null when nobody needs it.
    pub grad_weight: *mut c_void,
    /// `[N]` of the parameter kind, null when nobody needs it.
    pub grad_bias: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without grad_weight.
    pub weight_parts: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without grad_bias.
    pub bias_parts: *mut c_void,
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

/// Whether the kernels take weight and bias of this kind: that of the rows or, on the CPU, the one that
/// is computed in.
pub(crate) fn takes_parameters(parameters: Kind, rows: Kind, device: Device) -> bool {
    parameters == rows || device == Device::Cpu && parameters == compute_kind(rows)
}

/// The code of the kind of weight and bias.
fn parameter_code(parameters: Kind, rows: Kind, device: Device) -> Result<i32> {
    if !takes_parameters(parameters, rows, device) {
        return Err(Error::msg("internal error: weight and bias have another kind than the rows"));
    }
    Ok(parameters.code())
}

/// The alignment that all addresses have, in bytes: a power of two, at most 16.
fn alignment(pointers: &[*const c_void]) -> i64 {
    let all_at = |bytes: usize| pointers.iter().all(|pointer| pointer.addr() % bytes == 0);
    [16, 8, 4, 2].into_iter().find(|&bytes| all_at(bytes)).unwrap_or(1) as i64
}

/// Where and how rows are computed.
#[derive(Clone, Copy)]
pub(crate) struct On {
    pub device: Device,
    pub way: Way,
    pub kind: Kind,
    /// The kind of weight and bias.
    pub parameters: Kind,
}

impl On {
    pub fn rows(self, [rows, columns]: [i64; 2], alignment: i64, has_sums: bool) -> Result<Rows> {
        let On { device, way, kind, .. } = self;
        Ok(Rows { way, rows, columns, kind, alignment, has_sums, gpu: gpu(device)? })
    }
}

/// Whether dw and db are computed directly, by columns.
pub(crate) fn is_by_columns(plan: &Plan) -> bool {
    matches!(plan.way, Way::Few | Way::FewPasses)
}

impl Forward {
    /// Parameters without arrays and without a plan.
    pub fn new([rows, columns]: [i64; 2], eps: f64) -> Self {
        let (from, to) = (std::ptr::null(), std::ptr::null_mut());
        Forward {
            rows,
            columns,
            eps,
            kind: 0,
            parameter_kind: 0,
            plan: Plan::of_cpu(),
            input: from,
            weight: from,
            bias: from,
            output: to,
            mean: to,
            rstd: to,
        }
    }
}

impl Backward {
    /// Parameters without arrays and without a plan.
    pub fn new([rows, columns]: [i64; 2]) -> Self {
        let (from, to) = (std::ptr::null(), std::ptr::null_mut());
        Backward {
            rows,
            columns,
            parts: 0,
            kind: 0,
            parameter_kind: 0,
            plan: Plan::of_cpu(),
            grad_output: from,
            input: from,
            weight: from,
            mean: from,
            rstd: from,
            grad_input: to,
            grad_weight: to,
            grad_bias: to,
            weight_parts: to,
            bias_parts: to,
        }
    }

    fn has_sums(&self) -> bool {
        !(self.grad_weight.is_null() && self.grad_bias.is_null())
    }

    /// How many rows the scratch of each sum has, once there is a plan.
    pub fn rows_of_scratch(&self) -> i64 {
        if is_by_columns(&self.plan) { 0 } else { self.parts }
    }
}

impl Kernels {
    /// Computes the output and, where there is room for them, the moments of each row. The parameters
    /// lack kinds and a plan only.
    ///
    /// # Safety
    /// The arrays have the sizes and kinds that [`Forward`] states, and are on the device.
    pub unsafe fn run_forward(&self, on: On, mut params: Forward) -> Result<()> {
        let Forward { rows, columns, input, weight, bias, output, .. } = params;
        let alignment = alignment(&[input, weight, bias, output]);
        params.kind = on.kind.code();
        params.parameter_kind = parameter_code(on.parameters, on.kind, on.device)?;
        params.plan = on.rows([rows, columns], alignment, false)?.forward();
        // SAFETY: what the caller guarantees (see `# Safety`).
        unsafe { (self.forward)(on.device, &params) }
    }

    /// Adds kinds, the plan and the number of parts, which says how large the scratch is.
    pub fn plan_backward(&self, on: On, params: &mut Backward) -> Result<()> {
        let Backward { rows, columns, grad_output, input, weight, grad_input, .. } = *params;
        let alignment = alignment(&[grad_output, input, weight, grad_input]);
        params.kind = on.kind.code();
        params.parameter_kind = parameter_code(on.parameters, on.kind, on.device)?;
        let rows_of = on.rows([rows, columns], alignment, params.has_sums())?;
        (params.plan, params.parts) = self.backward_plan(on, &rows_of)?;
        Ok(())
    }

    /// The plan, and the number of parts into which sums over rows are cut.
    pub fn backward_plan(&self, on: On, rows_of: &Rows) -> Result<(Plan, i64)> {
        let plan = rows_of.backward();
        let clusters = self.clusters_at_a_time(&plan, on.kind, on.device)?;
        Ok((plan, rows_of.parts(&plan, on.device, clusters)))
    }

    /// Computes the gradients that have arrays.
    ///
    /// # Safety
    /// [`Kernels::plan_backward`] has planned the parameters. The arrays have the sizes and kinds that
    /// [`Backward`] states, and are on the device. Each gradient of weight and bias has scratch, unless
    /// [`Backward::rows_of_scratch`] is 0.
    pub unsafe fn run_backward(&self, device: Device, params: &Backward) -> Result<()> {
        let by_columns = is_by_columns(&params.plan);
        let is_one_kernel = params.plan.way == Way::Few;
        // On CUDA the first kernel has nothing to do if only gradients of weight and bias are wanted,
        // and these are computed by columns.
        let is_first_needed =
            device == Device::Cpu || !by_columns || is_one_kernel || !params.grad_input.is_null();
        if is_first_needed {
            // SAFETY: what the caller guarantees (see `# Safety`).
            unsafe { (self.backward)(device, params)? };
        }
        if params.has_sums() && !is_one_kernel {
            // SAFETY: as above.
            unsafe { (self.finish)(device, params)? };
        }
        Ok(())
    }

    /// How many clusters of this plan's blocks run at the same time; 0 if the plan has no clusters.
    fn clusters_at_a_time(&self, plan: &Plan, kind: Kind, device: Device) -> Result<i64> {
        #[cfg(tch_extension_cuda)]
        if plan.cluster > 1 {
            let _guard = crate::cuda::DeviceGuard::new(device.into())?;
            // SAFETY: the C side only reads the struct.
            return Ok(unsafe { (self.clusters)(plan, kind.code()) });
        }
        let _ = (plan, kind, device);
        Ok(0)
    }
}
