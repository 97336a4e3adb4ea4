//! Calls of the kernels of `csrc/loss`, by addresses of arrays: rows of logits, the loss of each, and its
//! gradient. Nothing here names tch, so that programs without it use it, too.

use crate::Result;
use crate::ops::kinds::{Device, Kind, compute_kind};
use std::ffi::c_void;
use std::ptr::null_mut;

/// Rows of logits, and what is computed of each. All arrays are row-major and, except for gaps
/// between rows of logits, contiguous. The compute kind is `Double` for logits of `Double`, and
/// otherwise `Float`.
#[repr(C)]
pub(crate) struct Rows {
    /// M, the number of rows.
    pub rows: i64,
    /// V, the number of classes.
    pub classes: i64,
    /// From a row of logits or gradients to the next one: V or more.
    pub row_stride: i64,
    /// Rows with this target have no loss.
    pub ignore_index: i64,
    /// From a row's incoming gradient to the next one's: 1, or 0 if all rows have one.
    pub grad_stride: i64,
    pub label_smoothing: f64,
    /// c: the loss is that of c tanh(z / c); 0 for the logits themselves.
    pub softcap: f64,
    /// By what the square of a row's lse is multiplied when it is added to the loss.
    pub z_loss: f64,
    /// Of logits and gradients.
    pub kind: i32,
    /// Whether the factor is computed for a mean, 1 / Σ w[t] over rows that are not ignored; on CUDA
    /// only.
    pub of_mean: i32,
    /// Whether the incoming gradients have the compute kind instead of the logits'.
    pub wide_grads: i32,
    /// Whether the total has the compute kind instead of the logits'.
    pub wide_total: i32,
    /// `[M, V]`.
    pub logits: *const c_void,
    /// `[M]`.
    pub targets: *const i64,
    /// `[V]` of the compute kind: the weights of the classes; null for ones.
    pub weight: *const c_void,
    /// `[1]` of the compute kind: the sum of these weights; null for V.
    pub weight_sum: *const c_void,
    /// `[M]` of the compute kind, null when nobody needs it.
    pub losses: *mut c_void,
    /// `[1]` of the compute kind: by what the sum of the losses is multiplied; null for 1.
    pub factor: *mut c_void,
    /// `[M]` or `[1]`: the incoming gradients; null for 1.
    pub grads: *const c_void,
    /// `[M, V]`: the gradients of the logits, null when nobody needs them. They may take the logits'
    /// place.
    pub gradients: *mut c_void,
    /// `[1]`, null when nobody needs it: the sum of the losses times the factor; on CUDA only.
    pub total: *mut c_void,
}

/// By what the sum of the rows' losses is multiplied, and their sum times this factor.
#[repr(C)]
pub(crate) struct Total {
    /// M, the number of rows.
    pub rows: i64,
    /// V, the number of weights.
    pub classes: i64,
    pub ignore_index: i64,
    /// Of the total; the others have the compute kind.
    pub kind: i32,
    /// Whether the factor is computed for a mean, 1 / Σ w[t] over rows that are not ignored.
    pub of_mean: i32,
    /// `[M]`, for a mean.
    pub targets: *const i64,
    /// `[V]`, null for ones.
    pub weight: *const c_void,
    /// `[M]`.
    pub losses: *const c_void,
    /// `[1]`, null for 1.
    pub factor: *mut c_void,
    /// `[1]`, null if there is no total.
    pub total: *mut c_void,
}

/// An array of gradients.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Scaled {
    /// The number of gradients; 0 if there is no such array.
    pub count: i64,
    /// Whether they have the compute kind instead of the gradients'; their products then have it, too.
    pub wide_from: i32,
    /// Whether the products have the compute kind.
    pub wide_to: i32,
    /// `[count]`.
    pub from: *const c_void,
    /// `[count]`, the same memory or other memory.
    pub to: *mut c_void,
}

/// Gradients, and the number by which they are multiplied.
#[repr(C)]
pub(crate) struct Scale {
    /// Of the gradients, but for those that are wide.
    pub kind: i32,
    /// Whether the factor has the compute kind instead of the gradients'.
    pub wide_factor: i32,
    /// `[1]`.
    pub factor: *const c_void,
    pub arrays: [Scaled; 3],
}

crate::kernels::raw_kernels! {
    "loss";
    fn run_rows(Rows) = tch_extension_loss_rows_cpu, tch_extension_loss_rows_cuda;
    fn run_total(Total) = tch_extension_loss_total_cpu, tch_extension_loss_total_cuda;
    fn run_scale(Scale) = tch_extension_loss_scale_cpu, tch_extension_loss_scale_cuda;
}

/// The first target that is neither a class nor `ignore_index`, with its index.
pub(crate) fn wrong_target(
    targets: impl IntoIterator<Item = i64>,
    classes: i64,
    ignore_index: i64,
) -> Option<(usize, i64)> {
    let is_right = |target: i64| (0..classes).contains(&target) || target == ignore_index;
    targets.into_iter().enumerate().find(|(_, target)| !is_right(*target))
}

impl Rows {
    /// Computes what has room, whether the device's kernel of rows computes factor and total or other
    /// kernels do. `kind` is that of the logits.
    ///
    /// # Safety
    /// The arrays have the sizes and kinds that are stated, and are on the device. Those that are written
    /// overlap no other, except that the gradients may be the logits. On the CPU each target is a class
    /// or `ignore_index`.
    pub unsafe fn run(mut self, device: Device, kind: Kind) -> Result<()> {
        self.kind = kind.code();
        let (of_mean, total) = (self.of_mean, self.total);
        let mut other = Total {
            rows: self.rows,
            classes: if self.weight.is_null() { 0 } else { self.classes },
            ignore_index: self.ignore_index,
            kind: self.kind,
            of_mean,
            targets: self.targets,
            weight: self.weight,
            losses: self.losses,
            factor: self.factor,
            total: null_mut(),
        };
        if !device.is_cuda() {
            (self.of_mean, self.total) = (0, null_mut());
            if of_mean != 0 {
                // SAFETY: what the caller guarantees (see `# Safety`), as below.
                unsafe { run_total(device, &other)? };
            }
        }
        // SAFETY: as above.
        unsafe { run_rows(device, &self)? };
        // Without rows, no kernel of theirs runs.
        if total.is_null() || device.is_cuda() && self.rows > 0 {
            return Ok(());
        }
        if self.wide_total != 0 {
            other.kind = compute_kind(kind).code();
        }
        (other.of_mean, other.total) = (i32::from(of_mean != 0 && self.rows == 0), total);
        // SAFETY: as above.
        unsafe { run_total(device, &other) }
    }
}

impl Total {
    /// Computes the factor of a mean, the total, or both.
    ///
    /// # Safety
    /// The arrays have the sizes and kinds that are stated, and are on the device. Those that are written
    /// overlap no other.
    pub unsafe fn run(&self, device: Device) -> Result<()> {
        // SAFETY: what the caller guarantees (see `# Safety`).
        unsafe { run_total(device, self) }
    }
}

impl Scale {
    /// Computes the products.
    ///
    /// # Safety
    /// As for [`Total::run`]; but products may take the place of their gradients.
    pub unsafe fn run(&self, device: Device) -> Result<()> {
        // SAFETY: what the caller guarantees (see `# Safety`).
        unsafe { run_scale(device, self) }
    }
}
