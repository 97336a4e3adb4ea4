//! What the ways on CUDA, and step by step on the CPU, have in common: a cell's kernels, the arrays
//! that they read, and those that they write.

use super::block::BlockCell;
use super::cluster::{ClusterBackward, ClusterForward};
use super::grid::{GridBackward, GridForward};
use super::step::{StepBackward, StepForward};
use super::{CellShape, Outputs, cluster, grid, step};
use crate::cuda::{LaunchStatus, cudaStream_t};
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::{address, describe, is_in_memory};
use crate::ffi::{checked, kind_code, optional_ptr};
use crate::{Error, Result};
use std::ffi::c_void;
use std::ptr::null_mut;
use tch::{Device, Kind, Tensor};

/// A cell's kernels on CUDA.
#[derive(Clone, Copy)]
pub(crate) struct CudaCell {
    pub shape: CellShape,
    pub step_forward: Start<StepForward>,
    pub step_backward: Start<StepBackward>,
    /// Absent for a cell that is no layer.
    pub block: Option<BlockCell>,
    pub cluster_forward: Start<ClusterForward>,
    pub cluster_backward: Start<ClusterBackward>,
    pub grid_forward: OnAGrid<GridForward>,
    pub grid_backward: OnAGrid<GridBackward>,
    pub wide_grid_forward: OnAGrid<GridForward>,
    /// Absent where the weights do not fit.
    pub wide_grid_backward: Option<OnAGrid<GridBackward>>,
    /// Grids that multiply `Float` and `Double` as they are, for a cell that has them.
    pub plain_grid_forward: Option<OnAGrid<GridForward>>,
    pub plain_grid_backward: Option<OnAGrid<GridBackward>>,
}

/// Starts a kernel.
pub(crate) type Start<Params> = unsafe extern "C" fn(*const Params, cudaStream_t) -> LaunchStatus;

/// Starts a kernel whose blocks have to run at the same time. The second argument becomes false if
/// they cannot; no kernel is then started.
pub(crate) type OnAGrid<Params> =
    unsafe extern "C" fn(*const Params, *mut bool, cudaStream_t) -> LaunchStatus;

/// A way with its launch parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// A product and a kernel for each step.
    Step,
    /// One kernel of this many blocks for the whole layer, backward perhaps without the gradients of
    /// the weights.
    Block { blocks: i32, sums_weights: bool },
    /// One kernel, with this many blocks for 8 rows, each `alone` on its multiprocessor.
    Cluster { cluster: i32, alone: bool, product: Product },
    /// One kernel; falls back to `Step` if there is none or not all its blocks can run at the same
    /// time.
    Grid { columns: i32, row_groups: i32, product: Product },
    /// As `Grid`, where blocks compute tiles of 64 rows.
    WideGrid { columns: i32, row_groups: i32, product: Product },
    /// As `Grid`, in `Float` and `Double` without rounding them to a narrower kind.
    PlainGrid { columns: i32, row_groups: i32 },
}

#[cfg(test)]
impl Kernel {
    /// The name of its way.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kernel::Step => "step",
            Kernel::Block { .. } => "block",
            Kernel::Cluster { .. } => "cluster",
            Kernel::Grid { .. } => "grid",
            Kernel::WideGrid { .. } => "wide grid",
            Kernel::PlainGrid { .. } => "plain grid",
        }
    }
}

/// What a kernel multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    /// W_h and h in their own kind.
    Plain,
    /// Scaled fp16 values, in place of `Float` in tf32 ([`super::scaled`]).
    Scaled,
}

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub steps: i64,
    pub batch: i64,
    pub hidden: i64,
}

/// What the forward pass reads: all contiguous and of one kind, except that gates and biases have
/// that of [`gates_kind`], and that c may have a wider one, which h of all steps then has, too.
pub(crate) struct Operands<'a> {
    /// `[G·H, H]`; its rows may be apart.
    pub weight: &'a Tensor,
    /// `[T, B, G·H]`
    pub input_gates: &'a Tensor,
    /// `[G·H]`
    pub bias: Option<&'a Tensor>,
    /// `[S·H]`
    pub separate_bias: Option<&'a Tensor>,
    /// `[B, H]`
    pub h0: &'a Tensor,
    /// `[B, H]`; absent where the state is h
    pub c0: Option<&'a Tensor>,
}

/// The kind in which sums of products of operands of this kind are computed.
pub(crate) fn gates_kind(product: Kind) -> Kind {
    if product == Kind::Double { Kind::Double } else { Kind::Float }
}

/// [`Operands`] as kernels get them.
pub(super) struct Source<'a> {
    pub shape: CellShape,
    pub tensors: &'a Operands<'a>,
    pub keep: bool,
    pub sizes: Sizes,
    /// Of the state.
    pub kind: Kind,
    pub kind_code: i32,
    /// Of the products' operands.
    pub product_kind: Kind,
    pub product_code: i32,
    pub device: Device,
    pub weight: *const c_void,
    pub weight_stride: i64,
    pub input_gates: *const c_void,
    pub bias: *const c_void,
    pub separate_bias: *const c_void,
    pub h0: *const c_void,
    pub c0: *const c_void,
}

impl<'a> Source<'a> {
    pub fn new(shape: CellShape, tensors: &'a Operands<'a>, keep: bool) -> Result<Source<'a>> {
        let Operands { weight, input_gates, bias, separate_bias, h0, c0 } = *tensors;
        let (steps, batch, _) = input_gates.size3()?;
        let hidden = h0.size2()?.1;
        let (product_kind, device) = (h0.f_kind()?, h0.device());
        let kind = c0.map_or(Ok(product_kind), |c0| c0.f_kind())?;
        check_kinds(kind, product_kind)?;
        let like = (product_kind, device);
        let sums = (gates_kind(product_kind), device);
        let rows = shape.gates * hidden;
        let h0 = checked("h0", h0, &[batch, hidden], like)?;
        let (weight, weight_stride) = checked_rows("weight", weight, [rows, hidden], like)?;
        Ok(Source {
            shape,
            tensors,
            keep,
            sizes: Sizes { steps, batch, hidden },
            kind,
            kind_code: kind_code(kind)?,
            product_kind,
            product_code: kind_code(product_kind)?,
            device,
            weight,
            weight_stride,
            input_gates: checked("input_gates", input_gates, &[steps, batch, rows], sums)?,
            bias: optional_ptr("bias", bias, &[rows], sums)?,
            separate_bias: optional_ptr(
                "separate_bias",
                separate_bias,
                &[shape.separate * hidden],
                sums,
            )?,
            h0,
            c0: c0.map_or(Ok(h0), |c0| checked("c0", c0, &[batch, hidden], (kind, device)))?,
        })
    }
}

/// Checks that there are kernels for a state and products of these kinds: they take any other pair for
/// one of these.
fn check_kinds(state: Kind, product: Kind) -> Result<()> {
    if state == product || state == Kind::Float && matches!(product, Kind::Half | Kind::BFloat16) {
        return Ok(());
    }
    Err(Error::msg(format!(
        "internal error: no recurrent kernel has a state of kind {state:?} and products of kind {product:?}"
    )))
}

/// [`checked`] for a matrix whose rows may be apart, and the distance from one to the next.
pub(super) fn checked_rows(
    name: &str,
    tensor: &Tensor,
    size: [i64; 2],
    like: (Kind, Device),
) -> Result<(*mut c_void, i64)> {
    let row_stride = match tensor.stride()[..] {
        [stride, 1] if stride > size[1] && size[0] > 1 => stride,
        _ => return Ok((checked(name, tensor, &size, like)?, size[1])),
    };
    let fits = tensor.size() == size
        && (tensor.f_kind()?, tensor.device()) == like
        && is_in_memory(tensor);
    if !fits {
        return Err(Error::msg(format!(
            "internal error: a kernel's {name} should be rows {size:?} of {like:?}, but is {}",
            describe(tensor)
        )));
    }
    Ok((address(tensor), row_stride))
}

/// What the forward pass writes.
pub(super) struct Arrays {
    pub output: Tensor,
    /// `[B, H]`: h after the last step.
    pub last_h: Tensor,
    /// `[B, H]`: c after the last step, unless `c` is that.
    pub last_c: Option<Tensor>,
    c: Option<Tensor>,
    activations: Option<Tensor>,
    pub c_stride: i64,
    pub output_ptr: *mut c_void,
    pub c_ptr: *mut c_void,
    pub activations_ptr: *mut c_void,
}

impl Arrays {
    pub fn new(of: &Source<'_>) -> Result<Arrays> {
        let Sizes { steps, batch, hidden } = of.sizes;
        let like = (of.kind, of.device);
        let empty = |size: &[i64]| empty_of(size, like);
        let (all, last) = ([steps, batch, hidden], [batch, hidden]);
        let output = empty(&all)?;
        let c_size: &[i64] = if of.keep { &all } else { &last };
        let c = (!of.shape.state_is_h).then(|| empty(c_size)).transpose()?;
        let last_c = c.as_ref().filter(|_| of.keep).map(|_| empty(&last)).transpose()?;
        let has_room = of.shape.saved == of.shape.gates && gates_kind(of.product_kind) == of.kind;
        let activations = match of.keep {
            // Each gate is read before its activation is written.
            true if has_room => Some(of.tensors.input_gates.shallow_clone()),
            true => Some(empty(&[steps, batch, of.shape.saved * hidden])?),
            false => None,
        };
        Ok(Arrays {
            c_stride: if of.keep { batch * hidden } else { 0 },
            output_ptr: output.data_ptr(),
            c_ptr: c.as_ref().map_or(null_mut(), Tensor::data_ptr),
            activations_ptr: activations.as_ref().map_or(null_mut(), Tensor::data_ptr),
            last_h: empty(&last)?,
            output,
            last_c,
            c,
            activations,
        })
    }

    pub fn activations(&self) -> Option<&Tensor> {
        self.activations.as_ref()
    }

    pub fn last_c_ptr(&self) -> *mut c_void {
        self.last_c.as_ref().map_or(null_mut(), Tensor::data_ptr)
    }

    /// Copies c after the last step, which a kernel for all steps writes in addition.
    pub fn copy_last_c(&mut self) -> Result<()> {
        if let Some((last_c, c)) = self.last_c.as_mut().zip(self.c.as_ref()) {
            last_c.f_copy_(&c.f_select(0, -1)?)?;
        }
        Ok(())
    }

    pub fn into_outputs(self) -> Outputs {
        let Arrays { output, last_h, last_c, c, activations, .. } = self;
        // Without a c of all steps, `c` is the last one.
        let (last_c, c) = if last_c.is_some() { (last_c, c) } else { (c, None) };
        Outputs { output, last_h, last_c, c, activations }
    }
}

/// All steps; there is at least one, as there are rows and columns.
pub(crate) fn forward(
    cell: &CudaCell,
    kernel: Kernel,
    operands: &Operands<'_>,
    keep: bool,
) -> Result<Outputs> {
    let source = Source::new(cell.shape, operands, keep)?;
    let made = match kernel {
        Kernel::Cluster { cluster, alone, product } => {
            Some(cluster::forward(&source, cell.cluster_forward, (cluster, alone), product)?)
        }
        Kernel::Grid { columns, row_groups, product } => {
            grid::forward(&source, cell.grid_forward, (columns, row_groups), product)?
        }
        Kernel::WideGrid { columns, row_groups, product } => {
            grid::forward(&source, cell.wide_grid_forward, (columns, row_groups), product)?
        }
        Kernel::PlainGrid { columns, row_groups } => match cell.plain_grid_forward {
            Some(start) => grid::forward(&source, start, (columns, row_groups), Product::Plain)?,
            None => None,
        },
        // The first is for a whole layer.
        Kernel::Block { .. } | Kernel::Step => None,
    };
    made.map_or_else(|| step::forward(&source, step::Start::Cuda(cell.step_forward)), Ok)
}

/// What the backward pass reads; as on the CPU.
pub(crate) type Saved<'a> = super::cpu::CpuSaved<'a>;

/// [`Saved`] and the gradients of the outputs, as kernels get them.
pub(super) struct Reversed<'a> {
    pub shape: CellShape,
    pub tensors: &'a Saved<'a>,
    grads: [Option<&'a Tensor>; 2],
    pub needs_grad_h0: bool,
    pub sizes: Sizes,
    pub kind_code: i32,
    product_kind: Kind,
    pub product_code: i32,
    pub device: Device,
    pub weight: *const c_void,
    pub weight_stride: i64,
    pub activations: *const c_void,
    pub states: *const c_void,
    pub first_state: *const c_void,
    pub grad_output: *const c_void,
    /// What `grad_output` points to.
    pub output_gradient: Option<&'a Tensor>,
}

impl<'a> Reversed<'a> {
    pub fn new(
        shape: CellShape,
        tensors: &'a Saved<'a>,
        [grad_output, grad_h, grad_c]: [Option<&'a Tensor>; 3],
        needs_grad_h0: bool,
    ) -> Result<Reversed<'a>> {
        let (steps, batch, hidden) = tensors.states.size3()?;
        let (kind, device) = (tensors.states.f_kind()?, tensors.states.device());
        let (like, all) = ((kind, device), [steps, batch, hidden]);
        let Saved { weight, activations, states, first_state } = tensors;
        let product_kind = weight.f_kind()?;
        check_kinds(kind, product_kind)?;
        let rows = [shape.gates * hidden, hidden];
        let (weight, weight_stride) = checked_rows("weight", weight, rows, (product_kind, device))?;
        Ok(Reversed {
            shape,
            tensors,
            grads: [grad_h, grad_c],
            needs_grad_h0,
            sizes: Sizes { steps, batch, hidden },
            kind_code: kind_code(kind)?,
            product_kind,
            product_code: kind_code(product_kind)?,
            device,
            weight,
            weight_stride,
            activations: checked(
                "activations",
                activations,
                &[steps, batch, shape.saved * hidden],
                like,
            )?,
            states: checked("states", states, &all, like)?,
            first_state: optional_ptr("first_state", *first_state, &[batch, hidden], like)?,
            grad_output: optional_ptr("grad_output", grad_output, &all, like)?,
            output_gradient: grad_output,
        })
    }
}

/// What the backward pass computes; as on the CPU, except that the gradients of the states have the
/// gates' kind.
pub(crate) type Gradients = super::cpu::CpuGradients;

impl Gradients {
    /// Room for the gates' gradients, and copies of those for the last states, because kernels
    /// overwrite them.
    pub(super) fn new(of: &Reversed<'_>) -> Result<Gradients> {
        let Sizes { steps, batch, hidden } = of.sizes;
        let like = (of.product_kind, of.device);
        let sums = (gates_kind(of.product_kind), of.device);
        let own = |given: Option<&Tensor>| -> Result<Tensor> {
            let mut own = Tensor::f_zeros([batch, hidden], sums)?;
            given.map(|given| own.f_copy_(given)).transpose()?;
            Ok(own)
        };
        let [grad_h, grad_c] = of.grads;
        let separate = of.shape.separate;
        Ok(Gradients {
            gates: empty_of(&[steps, batch, of.shape.gates * hidden], like)?,
            separate: (separate > 0)
                .then(|| empty_of(&[steps, batch, separate * hidden], like))
                .transpose()?,
            h0: own(grad_h)?,
            c0: own(grad_c)?,
        })
    }

    pub(super) fn separate_ptr(&self) -> *mut c_void {
        self.separate.as_ref().map_or(null_mut(), Tensor::data_ptr)
    }
}

/// The gradients of all steps. `grads` are those for the output, the last h and the last c.
pub(crate) fn backward(
    cell: &CudaCell,
    kernel: Kernel,
    saved: &Saved<'_>,
    grads: [Option<&Tensor>; 3],
    needs_grad_h0: bool,
) -> Result<Gradients> {
    let of = Reversed::new(cell.shape, saved, grads, needs_grad_h0)?;
    let made = match (kernel, cell.wide_grid_backward) {
        (Kernel::Cluster { cluster, alone, product }, _) => {
            Some(cluster::backward(&of, cell.cluster_backward, (cluster, alone), product)?)
        }
        (Kernel::Grid { columns, row_groups, product }, _) => {
            grid::backward(&of, cell.grid_backward, (columns, row_groups), product)?
        }
        (Kernel::WideGrid { columns, row_groups, product }, Some(start)) => {
            grid::backward(&of, start, (columns, row_groups), product)?
        }
        (Kernel::PlainGrid { columns, row_groups }, _) => match cell.plain_grid_backward {
            Some(start) => grid::backward(&of, start, (columns, row_groups), Product::Plain)?,
            None => None,
        },
        (Kernel::Block { .. } | Kernel::WideGrid { .. } | Kernel::Step, _) => None,
    };
    made.map_or_else(|| step::backward(&of, step::Start::Cuda(cell.step_backward)), Ok)
}
