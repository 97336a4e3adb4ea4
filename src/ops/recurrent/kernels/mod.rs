//! The kernels of `csrc/recurrent` that Rust calls itself.

pub(crate) mod biases;
pub(crate) mod block;
pub(crate) mod cluster;
pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod cudnn;
pub(crate) mod device;
pub(crate) mod grid;
pub(crate) mod onednn;
mod scaled;
pub(crate) mod step;

use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::ffi::{checked, take_message};
use crate::{Error, Result};
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};
use torch_sys::C_tensor;

/// The operand `[h[t-1] | x[t]]` of all steps, transposed, so that a product whose terms run over
/// steps and rows finds them adjacent in memory. `wgmma` accepts tf32 from shared memory in no
/// other order, and cuBLAS's kernels for the untransposed operand take 1.4 to 1.9 times as long.
#[repr(C)]
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
struct Columns {
    /// B, the batch size.
    batch: i64,
    /// T·B, the number of rows of all steps.
    rows: i64,
    /// H, the hidden size.
    hidden: i64,
    /// F, the number of features.
    features: i64,
    /// The distance from a column to the next: at least `rows`. The values after those are zeros.
    to_stride: i64,
    /// `[B, H]`.
    h0: *const f32,
    /// `[T, B, H]`.
    output: *const f32,
    /// `[T, B, F]`.
    input: *const f32,
    /// `[H + F, to_stride]`.
    to: *mut f32,
}

unsafe extern "C" {
    fn tch_extension_recurrent_product(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        bias: *const C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_recurrent_tf32_product(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        to: *const C_tensor,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// How large a cell's arrays are.
#[derive(Clone, Copy)]
pub(crate) struct CellShape {
    /// G, V and S (cells/cell.h): the numbers of gates, of saved values and of separate gates.
    pub gates: i64,
    pub saved: i64,
    pub separate: i64,
    /// Whether the state is h, and there is no c.
    pub state_is_h: bool,
}

/// What the forward pass of a sequence computes. No two tensors share memory.
pub(crate) struct Outputs {
    /// h of all steps, `[T, B, H]`
    pub output: Tensor,
    /// h after the last step, `[B, H]`
    pub last_h: Tensor,
    /// c after the last step, `[B, H]`; absent where the state is h
    pub last_c: Option<Tensor>,
    /// c of all steps, `[T, B, H]`, if it is kept and there is one; oneDNN keeps the last one only
    pub c: Option<Tensor>,
    /// What the backward pass reads, if it is kept and there is anything to compute: the values that
    /// a cell saves, `[T, B, V·H]`, or what a library asks for
    pub activations: Option<Tensor>,
}

/// Takes ownership of what C++ wrote.
fn owned(result: *mut C_tensor) -> Option<Tensor> {
    // SAFETY: C++ wrote a new tensor's handle, which we own, or null.
    (!result.is_null()).then(|| unsafe { Tensor::from_ptr(result) })
}

fn present(tensor: Option<Tensor>) -> Result<Tensor> {
    tensor.ok_or_else(|| Error::msg("internal error: libtorch returned no tensor"))
}

/// A product over all steps, with a bias, by the fastest of libtorch's products. Autograd records
/// nothing.
pub(crate) fn product(lhs: &Tensor, rhs: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let bias = bias.map_or(null(), |bias| bias.as_ptr());
    made_by(|result| {
        // SAFETY: the operands are live tensors, `bias` is one or null, and `result` has room for
        // the handle of a new one.
        unsafe { tch_extension_recurrent_product(lhs.as_ptr(), rhs.as_ptr(), bias, result) }
    })
}

/// A product of `Float` over all steps on CUDA in tf32, whatever libtorch's switch for products
/// says: the one for recurrent layers is another. It is added to `to`, if that is given. Autograd
/// records nothing.
pub(crate) fn tf32_product(lhs: &Tensor, rhs: &Tensor, to: Option<&Tensor>) -> Result<Tensor> {
    let to = to.map_or(null(), |to| to.as_ptr());
    made_by(|result| {
        // SAFETY: as in `product`, with `to` for the bias.
        unsafe { tch_extension_recurrent_tf32_product(lhs.as_ptr(), rhs.as_ptr(), to, result) }
    })
}

/// The tensor whose handle `call` writes, unless it returns a message.
fn made_by(call: impl FnOnce(*mut *mut C_tensor) -> *mut c_char) -> Result<Tensor> {
    let mut result = null_mut();
    match take_message(call(&mut result)) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: without an error message, C++ has written a new tensor's handle, which we own.
        None => Ok(unsafe { Tensor::from_ptr(result) }),
    }
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_recurrent_columns_cuda(
        params: *const Columns,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

/// How many floats 16 bytes hold: columns are padded to a multiple, so that cuBLAS may read them 16
/// bytes at a time.
const OF_16_BYTES: i64 = 4;

/// `[h[t-1] | x[t]]ᵀ` of all steps, `[H + F, T·B]`, of kind `Float` on CUDA.
pub(crate) fn columns([h0, output, input]: [&Tensor; 3]) -> Result<Tensor> {
    let ((steps, batch, hidden), features) = (output.size3()?, input.size3()?.2);
    let like = (Kind::Float, output.device());
    let (h0, output, input) = (plain(h0)?, plain(output)?, plain(input)?);
    let (rows, columns) = (steps * batch, hidden + features);
    let to_stride = (rows + OF_16_BYTES - 1) / OF_16_BYTES * OF_16_BYTES;
    let to = empty_of(&[columns, to_stride], like)?;
    let params = Columns {
        batch,
        rows,
        hidden,
        features,
        to_stride,
        h0: checked("h0", &h0, &[batch, hidden], like)?.cast(),
        output: checked("output", &output, &[steps, batch, hidden], like)?.cast(),
        input: checked("input", &input, &[steps, batch, features], like)?.cast(),
        to: checked("to", &to, &[columns, to_stride], like)?.cast(),
    };
    start(&params, &to)?;
    Ok(to.f_narrow(1, 0, rows)?)
}

#[cfg(tch_extension_cuda)]
fn start(params: &Columns, to: &Tensor) -> Result<()> {
    // SAFETY: `columns` checked that the tensors are contiguous and have the sizes that the struct
    // states; the one that is written is new.
    crate::cuda::launch(to.device(), |stream| unsafe {
        tch_extension_recurrent_columns_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn start(_: &Columns, to: &Tensor) -> Result<()> {
    Err(crate::ffi::no_kernel("recurrent", to.device()))
}
