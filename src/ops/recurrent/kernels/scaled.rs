//! In tf32, the kernels that keep W_h on the chip multiply `Float` as scaled fp16 values. `csrc/recurrent/scale_rows.h` says why they are as exact.

use super::cuda::{Product, Reversed, Source, checked_rows};
use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::kind_code;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::{Kind, Tensor};

/// Rows of float, and where their scaled values are written.
#[repr(C)]
struct ScaledRows {
    rows: i64,
    /// From a row to the next, in elements.
    stride: i64,
    /// At least as many as columns; those after the columns become zeros.
    to_stride: i64,
    /// `[rows, columns]`.
    from: *const f32,
    /// fp16 values.
    to: *mut c_void,
    /// `[rows]`: the factor that undoes the scaling of a row.
    scales: *mut f32,
    /// The exponent for a row of zeros.
    exponent_of_zeros: i64,
}

#[repr(C)]
struct ScaleRows {
    columns: i64,
    /// The second may have no rows.
    matrices: [ScaledRows; 2],
}

/// The exponent for rows of zeros in W_h. In the backward pass gradients are multiplied by the scale
/// before the largest of them is determined: there a row of zeros has the smallest scale
/// (kMostExponent), because a gradient that is multiplied only with zeros must not be the largest.
const OF_ZERO_WEIGHTS: i64 = 126;

/// The exponent for rows of zeros in h0. The scale of a GRU's h is no larger than that of its h0,
/// and this is the largest that it may have (kMessageScale).
const OF_ZERO_STATES: i64 = 15;

/// Rows of W_h are padded to a multiple of this many values, so that they may be read 16 bytes at a
/// time.
const OF_16_BYTES: i64 = 8;

/// A matrix of fp16 values with a scale for each row.
struct ScaledMatrix {
    values: Tensor,
    scales: Tensor,
    stride: i64,
}

impl ScaledMatrix {
    fn empty(of: &Tensor, stride: i64) -> Result<ScaledMatrix> {
        let (rows, _) = of.size2()?;
        Ok(ScaledMatrix {
            values: empty_of(&[rows, stride], (Kind::Half, of.device()))?,
            scales: empty_of(&[rows], (Kind::Float, of.device()))?,
            stride,
        })
    }

    fn rows(&self, from: &Tensor, exponent_of_zeros: i64) -> Result<ScaledRows> {
        let (rows, columns) = from.size2()?;
        let like = (Kind::Float, from.device());
        let (values, stride) = checked_rows("rows", from, [rows, columns], like)?;
        Ok(ScaledRows {
            rows,
            stride,
            to_stride: self.stride,
            from: values.cast(),
            to: self.values.data_ptr(),
            scales: self.scales.data_ptr().cast(),
            exponent_of_zeros,
        })
    }
}

/// W_h and h0 as a kernel multiplies them.
pub(super) struct Multiplied {
    pub kind_code: i32,
    pub weight: *const c_void,
    pub weight_stride: i64,
    pub h0: *const c_void,
    /// Null where nothing is scaled.
    pub scales: *const f32,
    pub h0_scales: *const f32,
    /// What the pointers point to, if it is not the operands.
    _owned: Option<(ScaledMatrix, Option<ScaledMatrix>)>,
}

impl Multiplied {
    pub fn forward(source: &Source<'_>, product: Product) -> Result<Multiplied> {
        match product {
            Product::Plain => Ok(Multiplied {
                kind_code: source.product_code,
                weight: source.weight,
                weight_stride: source.weight_stride,
                h0: source.h0,
                scales: null(),
                h0_scales: null(),
                _owned: None,
            }),
            Product::Scaled => scaled(source.tensors.weight, Some(source.tensors.h0)),
        }
    }

    pub fn backward(of: &Reversed<'_>, product: Product) -> Result<Multiplied> {
        match product {
            Product::Plain => Ok(Multiplied {
                kind_code: of.product_code,
                weight: of.weight,
                weight_stride: of.weight_stride,
                h0: null(),
                scales: null(),
                h0_scales: null(),
                _owned: None,
            }),
            Product::Scaled => scaled(of.tensors.weight, None),
        }
    }
}

fn scaled(weight: &Tensor, h0: Option<&Tensor>) -> Result<Multiplied> {
    let (_, hidden) = weight.size2()?;
    let of_weight = ScaledMatrix::empty(weight, round_up(hidden, OF_16_BYTES))?;
    let of_h0 = h0.map(|h0| ScaledMatrix::empty(h0, hidden)).transpose()?;
    let rows_of_h0 = match h0.zip(of_h0.as_ref()) {
        Some((h0, to)) => to.rows(h0, OF_ZERO_STATES)?,
        None => ScaledRows {
            rows: 0,
            stride: 0,
            to_stride: 0,
            from: null(),
            to: null_mut(),
            scales: null_mut(),
            exponent_of_zeros: 0,
        },
    };
    let matrices = [of_weight.rows(weight, OF_ZERO_WEIGHTS)?, rows_of_h0];
    start(&ScaleRows { columns: hidden, matrices }, weight)?;
    let address = |of: &Option<ScaledMatrix>, part: fn(&ScaledMatrix) -> &Tensor| {
        of.as_ref().map_or(null(), |of| part(of).data_ptr().cast_const())
    };
    Ok(Multiplied {
        kind_code: kind_code(Kind::Half)?,
        weight: of_weight.values.data_ptr(),
        weight_stride: of_weight.stride,
        h0: address(&of_h0, |of| &of.values),
        scales: of_weight.scales.data_ptr().cast_const().cast(),
        h0_scales: address(&of_h0, |of| &of.scales).cast(),
        _owned: Some((of_weight, of_h0)),
    })
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_recurrent_scale_rows_cuda(
        params: *const ScaleRows,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

#[cfg(tch_extension_cuda)]
fn start(params: &ScaleRows, on: &Tensor) -> Result<()> {
    // SAFETY: `scaled` checked the matrices that are read, and those that are written are new and
    // have the sizes that the struct states.
    crate::cuda::launch(on.device(), |stream| unsafe {
        tch_extension_recurrent_scale_rows_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn start(_: &ScaleRows, on: &Tensor) -> Result<()> {
    Err(crate::ffi::no_kernel("recurrent", on.device()))
}

fn round_up(size: i64, multiple: i64) -> i64 {
    (size + multiple - 1) / multiple * multiple
}

/// The memory of the grid's scaled gradients in the backward pass; the pointers are null without
/// any.
pub(super) struct Messages {
    pub values: *mut c_void,
    pub scales: *mut f32,
    _owned: Option<Tensor>,
}

impl Messages {
    pub fn new(of: &Reversed<'_>, product: Product) -> Result<Messages> {
        // Those of csrc/recurrent/grid/params.h.
        const ROWS: i64 = 8;
        const COLUMNS: i64 = 32;
        const COLUMNS_OF_SCALE: i64 = 16;
        const SCALED_COLUMNS: i64 = 128;
        if product == Product::Plain {
            return Ok(Messages { values: null_mut(), scales: null_mut(), _owned: None });
        }
        let (steps, batch, hidden) = (of.sizes.steps, of.sizes.batch, of.sizes.hidden);
        let rows = steps * round_up(batch, ROWS);
        let pairs = rows * of.shape.gates * round_up(hidden, COLUMNS) / 2;
        let scales = rows * (round_up(hidden, SCALED_COLUMNS) / COLUMNS_OF_SCALE);
        let memory = empty_of(&[pairs + scales], (Kind::Float, of.device))?;
        let values = memory.data_ptr();
        let scales = values.cast::<f32>().wrapping_offset(pairs as isize);
        Ok(Messages { values, scales, _owned: Some(memory) })
    }
}
