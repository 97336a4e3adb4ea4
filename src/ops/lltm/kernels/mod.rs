//! The kernels of `csrc/lltm`.

#[expect(dead_code, reason = "Rust only declares them")]
mod from_cpp;

use super::plan::{Plan, Sizes, Way};
use crate::ffi::{checked, no_kernel, optional_ptr, take_message};
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::ptr::null_mut;
use tch::{Device, Kind, Tensor};
use torch_sys::C_tensor;

/// The parameters of the forward pass. All tensors are contiguous. The gates' kind is Double if the
/// product's kind is Double, and Float otherwise.
#[repr(C)]
struct Forward {
    way: Way,
    /// For the CPU and grids: how many groups share the rows of the batch.
    row_groups: i32,
    /// For the CPU: how many groups share the columns of h. For clusters: how many blocks share
    /// rows. For grids: how many columns of h a block has.
    column_groups: i32,
    /// Whether the input is multiplied for all steps before the first step. Only the ways that call
    /// a kernel of the cell for each step can do without this: Fused may, and TensorCores always
    /// does.
    input_at_once: i32,
    /// For clusters and grids: whether Float is multiplied as fp16 values with scales.
    is_scaled: i32,
    reserved: i32,
    /// libtorch's current stream on CUDA.
    stream: *mut c_void,
    /// `[T, B, F]`, of the product's kind.
    input: *const C_tensor,
    /// `[3H, H + F]`, of the product's kind.
    weight: *const C_tensor,
    /// `[3H]`, of the gates' kind, or of the product's kind for kernels of the cell; may be null.
    bias: *const C_tensor,
    /// `[B, H]`, of the product's kind.
    h0: *const C_tensor,
    /// `[B, H]`, of the state's kind.
    c0: *const C_tensor,
    /// Scratch, `[T, B, 3H]`, of the gates' kind; null unless input_at_once is set.
    gates: *mut C_tensor,
    /// `[T, B, H]`, of the state's kind.
    output: *mut C_tensor,
    /// `[T, B, H]`, or `[1, B, H]` for the last step only, of the state's kind.
    c: *mut C_tensor,
    /// `[T, B, 3H]`, of the state's kind; may be `gates`; null if nobody needs them.
    activations: *mut C_tensor,
}

/// The parameters of the backward pass. All tensors are contiguous.
#[repr(C)]
struct Backward {
    way: Way,
    row_groups: i32,
    column_groups: i32,
    needs_grad_h0: i32,
    is_scaled: i32,
    reserved: i32,
    stream: *mut c_void,
    /// `[3H, H + F]`, of the product's kind.
    weight: *const C_tensor,
    /// `[T, B, H]`, of the state's kind; may be null.
    grad_output: *const C_tensor,
    /// `[T, B, 3H]`, of the state's kind.
    activations: *const C_tensor,
    /// `[T, B, H]`, of the state's kind.
    c: *const C_tensor,
    /// `[B, H]`, of the gates' kind: on entry the gradient for h[T-1], on return the one for h0.
    grad_h: *mut C_tensor,
    /// `[B, H]`, of the gates' kind: on entry the gradient for c[T-1], on return the one for c0.
    grad_c: *mut C_tensor,
    /// `[T, B, 3H]`, of the product's kind.
    grad_gates: *mut C_tensor,
}

unsafe extern "C" {
    fn tch_extension_lltm_forward(call: *const Forward) -> *mut c_char;
    fn tch_extension_lltm_backward(call: *const Backward) -> *mut c_char;
}

/// The kind in which products of operands of this kind are accumulated.
fn gates_kind(product: Kind) -> Kind {
    if product == Kind::Double { Kind::Double } else { Kind::Float }
}

impl Plan {
    /// The way, and the values of `row_groups` and `column_groups`.
    fn shares(self) -> (Way, i32, i32) {
        let narrow = |groups: i64| i32::try_from(groups).unwrap_or(1);
        match self {
            Plan::Step => (Way::Step, 1, 1),
            Plan::Cpu { row_groups, column_groups } => {
                (Way::Cpu, narrow(row_groups), narrow(column_groups))
            }
            Plan::Fused { .. } => (Way::Fused, 1, 1),
            Plan::Cluster { cluster, .. } => (Way::Cluster, 1, narrow(cluster)),
            Plan::Grid { columns, row_groups } => (Way::Grid, narrow(row_groups), narrow(columns)),
            Plan::WideGrid { columns, row_groups } => {
                (Way::WideGrid, narrow(row_groups), narrow(columns))
            }
            Plan::PlainGrid { columns, row_groups } => {
                (Way::PlainGrid, narrow(row_groups), narrow(columns))
            }
            Plan::TensorCores => (Way::TensorCores, 1, 1),
        }
    }

    /// Whether Float is multiplied as fp16 values with scales.
    fn is_scaled(self, product: Kind) -> bool {
        match self {
            Plan::Cluster { tf32, .. } => tf32,
            Plan::Grid { .. } | Plan::WideGrid { .. } => product == Kind::Float,
            _ => false,
        }
    }

    /// Whether the input is multiplied for all steps before the first step.
    fn input_at_once(self) -> bool {
        !matches!(self, Plan::Fused { input_at_once: false } | Plan::TensorCores)
    }

    /// The kind in which the bias is added.
    fn bias_kind(self, product: Kind) -> Kind {
        if matches!(self, Plan::Fused { .. } | Plan::TensorCores) {
            product
        } else {
            gates_kind(product)
        }
    }
}

/// Makes a device the current one for as long as this value lives, and holds the device's stream.
struct Place {
    _guard: crate::cuda::DeviceGuard,
    stream: *mut c_void,
}

impl Place {
    fn of(device: Device) -> Result<Place> {
        let guard = crate::cuda::DeviceGuard::new(device)?;
        let stream = match device {
            Device::Cpu => null_mut(),
            Device::Cuda(_) => crate::cuda::Stream::current(device)?.as_ptr(),
            device => return Err(no_kernel("lltm", device)),
        };
        Ok(Place { _guard: guard, stream })
    }
}

/// The tensors that the forward pass reads. All are contiguous, with the shapes and kinds that
/// `Forward` states.
pub(crate) struct Operands<'a> {
    pub input: &'a Tensor,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub h0: &'a Tensor,
    pub c0: &'a Tensor,
}

impl Operands<'_> {
    pub fn sizes(&self) -> Result<Sizes> {
        let (steps, batch, features) = self.input.size3()?;
        Ok(Sizes { steps, batch, features, hidden: self.h0.size2()?.1 })
    }
}

/// The tensors that the forward pass computes.
pub(crate) struct Outputs {
    /// `[T, B, H]`.
    pub output: Tensor,
    /// c of all steps, `[T, B, H]`; or only of the last step, `[1, B, H]`, if nothing is kept for
    /// the backward pass.
    pub c: Tensor,
    /// What [`backward`] reads, `[T, B, 3H]`, if it is kept.
    pub activations: Option<Tensor>,
}

/// Computes all steps. There has to be at least one step, one row and one column. It allocates the
/// gates, the output and c. The gates' memory becomes that of the activations if both have the same
/// kind.
pub(crate) fn forward(plan: Plan, operands: &Operands<'_>, keep: bool) -> Result<Outputs> {
    let Sizes { steps, batch, features, hidden } = operands.sizes()?;
    let device = operands.input.device();
    let (product, state) = (operands.h0.f_kind()?, operands.c0.f_kind()?);
    let sums = gates_kind(product);
    let bias_kind = plan.bias_kind(product);
    let bias = operands
        .bias
        .map(|bias| bias.f_reshape([-1])?.f_to_kind(bias_kind)?.f_contiguous())
        .transpose()?;
    checked("input", operands.input, &[steps, batch, features], (product, device))?;
    checked("weight", operands.weight, &[3 * hidden, hidden + features], (product, device))?;
    optional_ptr("bias", bias.as_ref(), &[3 * hidden], (bias_kind, device))?;
    checked("h0", operands.h0, &[batch, hidden], (product, device))?;
    checked("c0", operands.c0, &[batch, hidden], (state, device))?;

    let empty = |size: [i64; 3], kind| Tensor::f_empty(size, (kind, device));
    let mut gates =
        plan.input_at_once().then(|| empty([steps, batch, 3 * hidden], sums)).transpose()?;
    let mut output = empty([steps, batch, hidden], state)?;
    let mut c = empty([if keep { steps } else { 1 }, batch, hidden], state)?;
    let mut activations = match &gates {
        _ if !keep => None,
        // The activations share the gates' memory: each gate is read once, before its activation is
        // written.
        Some(gates) if sums == state => Some(gates.shallow_clone()),
        _ => Some(empty([steps, batch, 3 * hidden], state)?),
    };
    let place = Place::of(device)?;
    let (way, row_groups, column_groups) = plan.shares();
    let call = Forward {
        way,
        row_groups,
        column_groups,
        input_at_once: i32::from(plan.input_at_once()),
        is_scaled: i32::from(plan.is_scaled(product)),
        reserved: 0,
        stream: place.stream,
        input: operands.input.as_ptr(),
        weight: operands.weight.as_ptr(),
        bias: bias.as_ref().map_or(null_mut(), Tensor::as_ptr),
        h0: operands.h0.as_ptr(),
        c0: operands.c0.as_ptr(),
        gates: gates.as_mut().map_or(null_mut(), Tensor::as_mut_ptr),
        output: output.as_mut_ptr(),
        c: c.as_mut_ptr(),
        activations: activations.as_mut().map_or(null_mut(), Tensor::as_mut_ptr),
    };
    // SAFETY: the tensors are alive; they were checked or allocated above to be as `Forward`
    // states, and those that are written were allocated here.
    match take_message(unsafe { tch_extension_lltm_forward(&call) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(Outputs { output, c, activations }),
    }
}

/// The tensors that the backward pass reads.
pub(crate) struct BackwardInputs<'a> {
    pub weight: &'a Tensor,
    /// The gradients for h of each step, for h of the last step, and for c of the last step; each
    /// may be absent.
    pub grad_output: Option<&'a Tensor>,
    pub grad_h: Option<&'a Tensor>,
    pub grad_c: Option<&'a Tensor>,
    pub activations: &'a Tensor,
    pub c: &'a Tensor,
}

/// The gradients that the backward pass computes.
pub(crate) struct Gradients {
    /// For the gates, `[T, B, 3H]`, of the product's kind.
    pub gates: Tensor,
    /// For h0, `[B, H]`; its values are meaningless unless it was asked for.
    pub h0: Tensor,
    /// For c0, `[B, H]`.
    pub c0: Tensor,
}

/// Computes the gradients of all steps, in reverse order, for the same sizes as [`forward`].
pub(crate) fn backward(
    plan: Plan,
    inputs: &BackwardInputs<'_>,
    needs_grad_h0: bool,
) -> Result<Gradients> {
    let (steps, batch, hidden) = inputs.c.size3()?;
    let device = inputs.c.device();
    let (product, state) = (inputs.weight.f_kind()?, inputs.c.f_kind()?);
    let sums = gates_kind(product);
    let all = [steps, batch, hidden];
    let columns = inputs.weight.size2()?.1;
    checked("weight", inputs.weight, &[3 * hidden, columns], (product, device))?;
    optional_ptr("grad_output", inputs.grad_output, &all, (state, device))?;
    checked("activations", inputs.activations, &[steps, batch, 3 * hidden], (state, device))?;
    checked("c", inputs.c, &all, (state, device))?;

    // These are copies, because the kernels overwrite them.
    let own = |given: Option<&Tensor>| -> Result<Tensor> {
        let mut own = Tensor::f_empty([batch, hidden], (sums, device))?;
        match given {
            Some(given) => own.f_copy_(given)?,
            None => drop(own.f_zero_()?),
        }
        Ok(own)
    };
    let (mut grad_h, mut grad_c) = (own(inputs.grad_h)?, own(inputs.grad_c)?);
    let mut grad_gates = Tensor::f_empty([steps, batch, 3 * hidden], (product, device))?;
    let place = Place::of(device)?;
    let (way, row_groups, column_groups) = plan.shares();
    let call = Backward {
        way,
        row_groups,
        column_groups,
        needs_grad_h0: i32::from(needs_grad_h0),
        is_scaled: i32::from(plan.is_scaled(product)),
        reserved: 0,
        stream: place.stream,
        weight: inputs.weight.as_ptr(),
        grad_output: inputs.grad_output.map_or(null_mut(), Tensor::as_ptr),
        activations: inputs.activations.as_ptr(),
        c: inputs.c.as_ptr(),
        grad_h: grad_h.as_mut_ptr(),
        grad_c: grad_c.as_mut_ptr(),
        grad_gates: grad_gates.as_mut_ptr(),
    };
    // SAFETY: as in `forward`.
    match take_message(unsafe { tch_extension_lltm_backward(&call) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(Gradients { gates: grad_gates, h0: grad_h, c0: grad_c }),
    }
}
