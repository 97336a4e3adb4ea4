//! Calls of the kernels of rows that are sums: h = x + residual and y = norm(h), by addresses of arrays.

use super::{Backward, Kernels, On, alignment, parameter_code};
use crate::Result;
use crate::ops::kinds::{Device, Kind};
use crate::ops::norm::plan::{Plan, Rows};
#[cfg(tch_extension_cuda)]
use std::ffi::c_char;
use std::ffi::c_void;

/// The state of libtorch's random generator on CUDA.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Random {
    /// The seed, unless it is in memory.
    pub seed: u64,
    /// How many numbers were drawn; in addition to those in memory, if there are any.
    pub offset: u64,
    /// On the device; null if the seed is above.
    pub seed_at: *const i64,
    /// On the device; null if all is above.
    pub offset_at: *const i64,
}

/// The parameters of the forward kernels of rows that are sums. All arrays are row-major and
/// contiguous, and no two overlap.
#[repr(C)]
pub(crate) struct AddForward {
    /// M, the number of rows.
    pub rows: i64,
    /// N, the number of columns.
    pub columns: i64,
    pub eps: f64,
    /// The probability that a value of the input is dropped. The CPU's kernels know no dropout.
    pub dropout: f64,
    /// The `TchExtensionKind` of input and output.
    pub kind: i32,
    /// The kind of residual and sum: `kind`, or Float with an input of a half kind.
    pub stream_kind: i32,
    /// The kind of weight and bias: `stream_kind`, or on the CPU Float with an input of a half kind.
    pub parameter_kind: i32,
    pub reserved: i32,
    /// How rows are spread over threads; the CPU ignores it.
    pub plan: Plan,
    /// Read only with dropout.
    pub random: Random,
    /// `[M, N]`.
    pub input: *const c_void,
    /// `[M, N]`.
    pub residual: *const c_void,
    /// `[N]`, null for ones.
    pub weight: *const c_void,
    /// `[N]`, null for zeros.
    pub bias: *const c_void,
    /// `[M, N]`.
    pub sum: *mut c_void,
    /// `[M, N]`.
    pub output: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it or the statistic has no mean.
    pub mean: *mut c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    pub rstd: *mut c_void,
    /// `[2]`: where the kernel leaves the generator's seed and offset; null when nobody needs them.
    pub kept_state: *mut i64,
}

/// The parameters of the backward kernels of rows that are sums. All arrays are row-major and
/// contiguous, and no two overlap.
#[repr(C)]
pub(crate) struct AddBackward {
    /// M, the number of rows.
    pub rows: i64,
    /// N, the number of columns.
    pub columns: i64,
    /// P: the sums over rows, for weight and bias, are cut into this many parts.
    pub parts: i64,
    /// The probability that a value of the input was dropped. The CPU's kernels know no dropout.
    pub dropout: f64,
    /// The `TchExtensionKind` of the output, of its gradient and of the input's.
    pub kind: i32,
    /// The kind of the sum, of its gradient and of the residual's.
    pub stream_kind: i32,
    /// The kind of weight and bias.
    pub parameter_kind: i32,
    pub reserved: i32,
    /// How rows are spread over threads; the CPU ignores it.
    pub plan: Plan,
    /// The state that the forward pass kept. Read only with dropout.
    pub random: Random,
    /// `[M, N]`.
    pub grad_output: *const c_void,
    /// `[M, N]`, null for zeros.
    pub grad_sum: *const c_void,
    /// `[M, N]`.
    pub sum: *const c_void,
    /// `[N]`, null for ones.
    pub weight: *const c_void,
    /// `[M]` of the compute kind; null if the statistic has no mean.
    pub mean: *const c_void,
    /// `[M]` of the compute kind.
    pub rstd: *const c_void,
    /// `[M, N]`, null when nobody needs it.
    pub grad_residual: *mut c_void,
    /// `[M, N]`, null when nobody needs it or it is the residual's.
    pub grad_input: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without a gradient of the weight.
    pub weight_parts: *mut c_void,
    /// Scratch, `[P, N]` of the compute kind; null without a gradient of the bias.
    pub bias_parts: *mut c_void,
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
    pub(crate) fn tch_extension_norm_random(device: i32, result: *mut Random) -> *mut c_char;
}

impl Random {
    pub const NONE: Random =
        Random { seed: 0, offset: 0, seed_at: std::ptr::null(), offset_at: std::ptr::null() };
}

/// Where and how rows that are sums are computed. The kind of `on` is that of the branch.
#[derive(Clone, Copy)]
pub(crate) struct AddOn {
    pub on: On,
    /// The kind of residual and sum.
    pub stream: Kind,
}

impl AddOn {
    /// Whether one kernel computes rows of this shape, in arrays at multiples of 16 bytes; also those of
    /// the backward pass, if there is to be one.
    pub fn is_one_kernel(self, sizes: [i64; 2], has_backward: bool) -> Result<bool> {
        let rows_of = self.on.rows(sizes, 16, true)?;
        let has_forward = || rows_of.forward_of_sum().is_some();
        let takes_backward = || self.backward_plan(&rows_of).is_some();
        let is_on_cpu = self.on.device == Device::Cpu;
        Ok(is_on_cpu || has_forward() && (!has_backward || takes_backward()))
    }

    pub fn backward_plan(self, rows_of: &Rows) -> Option<Plan> {
        rows_of.backward_of_sum(self.stream.elt_size_in_bytes() as i64)
    }

    /// The CPU ignores the plan.
    pub fn or_of_cpu(self, plan: Option<Plan>) -> Option<Plan> {
        plan.or_else(|| (self.on.device == Device::Cpu).then(Plan::of_cpu))
    }
}

impl AddForward {
    /// Parameters without arrays and without a plan.
    pub fn new([rows, columns]: [i64; 2], eps: f64) -> Self {
        let (from, to) = (std::ptr::null(), std::ptr::null_mut());
        AddForward {
            rows,
            columns,
            eps,
            dropout: 0.0,
            kind: 0,
            stream_kind: 0,
            parameter_kind: 0,
            reserved: 0,
            plan: Plan::of_cpu(),
            random: Random::NONE,
            input: from,
            residual: from,
            weight: from,
            bias: from,
            sum: to,
            output: to,
            mean: to,
            rstd: to,
            kept_state: std::ptr::null_mut(),
        }
    }

    /// Adds kinds and the plan. It is false if no one kernel computes such rows.
    pub fn plan(&mut self, of: AddOn) -> Result<bool> {
        let AddForward { rows, columns, input, residual, weight, bias, sum, output, .. } = *self;
        let alignment = alignment(&[input, residual, weight, bias, sum, output]);
        let on = of.on;
        self.kind = on.kind.code();
        self.stream_kind = of.stream.code();
        self.parameter_kind = parameter_code(on.parameters, of.stream, on.device)?;
        let plan = on.rows([rows, columns], alignment, true)?.forward_of_sum();
        let plan = of.or_of_cpu(plan);
        self.plan = plan.unwrap_or(self.plan);
        Ok(plan.is_some())
    }
}

impl AddBackward {
    /// Parameters without arrays and without a plan.
    pub fn new([rows, columns]: [i64; 2]) -> Self {
        let (from, to) = (std::ptr::null(), std::ptr::null_mut());
        AddBackward {
            rows,
            columns,
            parts: 0,
            dropout: 0.0,
            kind: 0,
            stream_kind: 0,
            parameter_kind: 0,
            reserved: 0,
            plan: Plan::of_cpu(),
            random: Random::NONE,
            grad_output: from,
            grad_sum: from,
            sum: from,
            weight: from,
            mean: from,
            rstd: from,
            grad_residual: to,
            grad_input: to,
            weight_parts: to,
            bias_parts: to,
        }
    }

    /// Adds kinds, the plan and the number of parts, which the scratch of each sum has. It is false if no
    /// one kernel computes such rows.
    pub fn plan(&mut self, of: AddOn) -> Result<bool> {
        let AddBackward { rows, columns, sum, grad_output, grad_sum, weight, .. } = *self;
        let written = [self.grad_residual, self.grad_input].map(<*mut c_void>::cast_const);
        let [grad_residual, grad_input] = written;
        let alignment = alignment(&[sum, grad_output, grad_sum, weight, grad_residual, grad_input]);
        let on = of.on;
        self.kind = on.kind.code();
        self.stream_kind = of.stream.code();
        self.parameter_kind = parameter_code(on.parameters, of.stream, on.device)?;
        let rows_of = on.rows([rows, columns], alignment, true)?;
        let Some(plan) = of.or_of_cpu(of.backward_plan(&rows_of)) else { return Ok(false) };
        self.plan = plan;
        self.parts = rows_of.parts(&plan, on.device, 0);
        Ok(true)
    }
}

impl AddKernels {
    /// Computes the gradients that have arrays; those of weight and bias are apart from the others.
    ///
    /// # Safety
    /// [`AddBackward::plan`] has planned the parameters. The arrays have the sizes and kinds that
    /// [`AddBackward`] states, and are on the device. Each gradient of weight and bias, `[N]` of the
    /// parameters' kind, has scratch.
    pub unsafe fn run_backward(
        &self,
        of: AddOn,
        params: &AddBackward,
        [grad_weight, grad_bias]: [*mut c_void; 2],
    ) -> Result<()> {
        // SAFETY: what the caller guarantees (see `# Safety`).
        unsafe { (self.backward)(of.on.device, params)? };
        let AddBackward { rows, columns, parts, plan, weight_parts, bias_parts, .. } = *params;
        let kind = of.on.parameters.code();
        let sums = Backward {
            parts,
            plan,
            kind,
            parameter_kind: kind,
            grad_weight,
            grad_bias,
            weight_parts,
            bias_parts,
            ..Backward::new([rows, columns])
        };
        if !sums.has_sums() {
            return Ok(());
        }
        // SAFETY: as above; this kernel reads only the partial sums.
        unsafe { (self.norm.finish)(of.on.device, &sums) }
    }
}
