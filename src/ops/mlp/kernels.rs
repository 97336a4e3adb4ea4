//! The kernels of `csrc/mlp`.

use crate::ffi::facts::empty_of;
use crate::ffi::{checked, kind_code, optional_ptr};
use crate::ops::column_sums::ColumnSums;
use crate::{Error, Result};
use std::ffi::c_void;
use tch::{Device, Tensor};

/// The function between the two layers of `gelu_mlp`.
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// `z / 2 (1 + tanh(√(2 / π) (z + 0.044715 z³)))`: torch's gelu with `approximate="tanh"`, as in
    /// GPT-2.
    #[default]
    GeluTanh,
    /// `z / 2 (1 + erf(z / √2))`: torch's gelu, as in BERT.
    Gelu,
    /// `max(z, 0)²`.
    ReluSquared,
    /// `z / (1 + exp(-z))`.
    Silu,
}

/// The parameters of the kernels that compute a = act(z).
#[repr(C)]
pub(crate) struct Activate {
    /// The number of values.
    count: i64,
    activation: Activation,
    /// The `TchExtensionKind` of both arrays.
    kind: i32,
    /// z, `[count]`.
    input: *const c_void,
    /// a, `[count]`; it may be z.
    output: *mut c_void,
}

/// The parameters of the kernels that compute dz = da act'(z), the sums of its columns, and a.
#[repr(C)]
pub(crate) struct Differentiate {
    /// The sums of M rows and H columns. `sums.sums` is db, `[H]`, or null when nobody needs it.
    sums: ColumnSums,
    activation: Activation,
    /// The `TchExtensionKind` of every array.
    kind: i32,
    /// da, `[M, H]`.
    grad: *const c_void,
    /// z, `[M, H]`.
    input: *const c_void,
    /// dz, `[M, H]`; it may be da.
    grad_input: *mut c_void,
    /// a = act(z), `[M, H]`, or null when nobody needs it.
    output: *mut c_void,
}

/// The parameters of the kernels that compute h = silu(g) u.
#[repr(C)]
pub(crate) struct Gate {
    /// The number of values.
    count: i64,
    /// The `TchExtensionKind` of every array.
    kind: i32,
    reserved: i32,
    /// g, `[count]`.
    gate: *const c_void,
    /// u, `[count]`.
    up: *const c_void,
    /// h, `[count]`; it may be g or u.
    output: *mut c_void,
}

/// The parameters of the kernels that compute dg = dh u silu'(g), du = dh silu(g), and h.
#[repr(C)]
pub(crate) struct GateBackward {
    /// The number of values.
    count: i64,
    /// The `TchExtensionKind` of every array.
    kind: i32,
    reserved: i32,
    /// dh, `[count]`.
    grad: *const c_void,
    /// g, `[count]`.
    gate: *const c_void,
    /// u, `[count]`.
    up: *const c_void,
    /// dg, `[count]`; it may be dh.
    grad_gate: *mut c_void,
    /// du, `[count]`; it may be dh, unless dg is.
    grad_up: *mut c_void,
    /// h = silu(g) u, `[count]`, or null when nobody needs it.
    output: *mut c_void,
}

unsafe extern "C" {
    fn tch_extension_mlp_differentiate_finish_cpu(params: *const Differentiate);
}

crate::kernels::raw_kernels! {
    "mlp";
    fn run_activate(Activate) = tch_extension_mlp_activate_cpu, tch_extension_mlp_activate_cuda;
    /// Computes all sums on CUDA; on the CPU it computes the sums of each slab.
    fn run_differentiate(Differentiate) =
        tch_extension_mlp_differentiate_cpu, tch_extension_mlp_differentiate_cuda;
    fn run_gate(Gate) = tch_extension_mlp_gate_cpu, tch_extension_mlp_gate_cuda;
    fn run_gate_backward(GateBackward) =
        tch_extension_mlp_gate_backward_cpu, tch_extension_mlp_gate_backward_cuda;
}

/// A new tensor of the same size, contiguous.
fn new_like(tensor: &Tensor) -> Result<Tensor> {
    empty_of(&tensor.size(), (tensor.f_kind()?, tensor.device()))
}

/// The number of the tensor's elements, which kernels count.
fn count_of(tensor: &Tensor) -> Result<i64> {
    i64::try_from(tensor.numel()).map_err(|_| Error::msg("more than 2⁶³ elements"))
}

/// act(z), of a contiguous tensor.
pub(crate) fn activate(input: &Tensor, activation: Activation) -> Result<Tensor> {
    let output = new_like(input)?;
    activate_to(input, activation, &output)?;
    Ok(output)
}

/// act(z) in the place of z, which belongs to the caller alone.
pub(crate) fn activate_in_place(input: Tensor, activation: Activation) -> Result<Tensor> {
    activate_to(&input, activation, &input)?;
    Ok(input)
}

/// `output` is `input`, or a new tensor.
fn activate_to(input: &Tensor, activation: Activation, output: &Tensor) -> Result<()> {
    let (size, like) = (input.size(), (input.f_kind()?, input.device()));
    let params = Activate {
        count: count_of(input)?,
        activation,
        kind: kind_code(like.0)?,
        input: checked("input", input, &size, like)?,
        output: checked("output", output, &size, like)?,
    };
    // SAFETY: `checked` made sure that both arrays are contiguous, of this size and of this kind. The
    // output overlaps the input only if it is the same array, of which each value is read before it
    // is written.
    unsafe { run_activate(like.1, &params) }
}

/// What [`differentiate`] computes besides dz.
pub(crate) struct Wanted {
    /// The sums of the columns of dz.
    pub sums: bool,
    /// act(z).
    pub output: bool,
}

/// What [`differentiate`] computes.
pub(crate) struct Derivatives {
    /// dz.
    pub grad_input: Tensor,
    /// The sums of the columns of dz, `[H]`.
    pub sums: Option<Tensor>,
    /// act(z).
    pub output: Option<Tensor>,
}

/// dz = da act'(z) in the place of da, which belongs to the caller alone, of contiguous `[M, H]`.
pub(crate) fn differentiate(
    grad: Tensor,
    input: &Tensor,
    activation: Activation,
    wanted: &Wanted,
) -> Result<Derivatives> {
    let (size, like) = (input.size(), (input.f_kind()?, input.device()));
    let (rows, columns) = input.size2()?;
    let output = wanted.output.then(|| new_like(input)).transpose()?;
    let mut sums_to = wanted.sums.then(|| empty_of(&[columns], like)).transpose()?;
    let (sums, _partial) = match &mut sums_to {
        // Rows whose length is not a multiple of 16 bytes are slow in the products already.
        Some(to) => ColumnSums::new((rows, columns), false, to, like)?,
        None => (ColumnSums::none((rows, columns)), None),
    };
    let address = checked("grad", &grad, &size, like)?;
    let params = Differentiate {
        sums,
        activation,
        kind: kind_code(like.0)?,
        grad: address,
        input: checked("input", input, &size, like)?,
        grad_input: address,
        output: optional_ptr("output", output.as_ref(), &size, like)?,
    };
    // SAFETY: `checked` made sure that the arrays are contiguous, of these sizes and of this kind.
    // Those that are written are new, or da, of which each value is read before it is written.
    unsafe { run_differentiate(like.1, &params)? };
    if like.1 == Device::Cpu && params.sums.slabs > 1 {
        // SAFETY: as above; `run_differentiate` has written the partial sums.
        unsafe { tch_extension_mlp_differentiate_finish_cpu(&params) };
    }
    Ok(Derivatives { grad_input: grad, sums: sums_to, output })
}

/// silu(g) u, of contiguous tensors of one size.
pub(crate) fn gate(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let output = new_like(gate)?;
    gate_to(gate, up, &output)?;
    Ok(output)
}

/// silu(g) u in the place of g, which belongs to the caller alone.
pub(crate) fn gate_in_place(gate: Tensor, up: &Tensor) -> Result<Tensor> {
    gate_to(&gate, up, &gate)?;
    Ok(gate)
}

/// `output` is `gate`, or a new tensor.
fn gate_to(gate: &Tensor, up: &Tensor, output: &Tensor) -> Result<()> {
    let (size, like) = (gate.size(), (gate.f_kind()?, gate.device()));
    let params = Gate {
        count: count_of(gate)?,
        kind: kind_code(like.0)?,
        reserved: 0,
        gate: checked("gate", gate, &size, like)?,
        up: checked("up", up, &size, like)?,
        output: checked("output", output, &size, like)?,
    };
    // SAFETY: as in `activate_to`.
    unsafe { run_gate(like.1, &params) }
}

/// What [`gate_backward`] computes.
pub(crate) struct GateDerivatives {
    /// dg.
    pub gate: Tensor,
    /// du.
    pub up: Tensor,
    /// silu(g) u.
    pub output: Option<Tensor>,
}

/// dg = dh u silu'(g), and du = dh silu(g) in the place of dh, which belongs to the caller alone; of
/// contiguous tensors of one size.
pub(crate) fn gate_backward(
    grad: Tensor,
    gate: &Tensor,
    up: &Tensor,
    wants_output: bool,
) -> Result<GateDerivatives> {
    let (size, like) = (gate.size(), (gate.f_kind()?, gate.device()));
    let grad_gate = new_like(gate)?;
    let output = wants_output.then(|| new_like(gate)).transpose()?;
    let address = checked("grad", &grad, &size, like)?;
    let params = GateBackward {
        count: count_of(gate)?,
        kind: kind_code(like.0)?,
        reserved: 0,
        grad: address,
        gate: checked("gate", gate, &size, like)?,
        up: checked("up", up, &size, like)?,
        grad_gate: checked("grad_gate", &grad_gate, &size, like)?,
        grad_up: address,
        output: optional_ptr("output", output.as_ref(), &size, like)?,
    };
    // SAFETY: as in `differentiate`.
    unsafe { run_gate_backward(like.1, &params)? };
    Ok(GateDerivatives { gate: grad_gate, up: grad, output })
}
