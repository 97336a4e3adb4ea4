//! Descriptions of products of contiguous tensors, without the tensors.

use super::*;
use std::ptr::{null, null_mut, without_provenance};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Bias {
    Row,
    Full,
    None,
}

/// How the factors are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::ops) enum Layout {
    /// `[M, K]` and `[N, K]`: a layer.
    Linear,
    /// `[M, K]` and `[K, N]`.
    Matrices,
    /// `[K, M]` and `[K, N]`: the gradient of a weight.
    Transposed,
}

/// What an H200 can do with a product. `batches` are those of lhs and rhs, each 1 or as many as of the
/// product, and lhs begins `offset` elements after a multiple of 256 bytes.
pub(in crate::ops) fn contiguous(
    (batches, [m, k, n]): ([i64; 2], [i64; 3]),
    bias: Bias,
    (kind, tf32): (Kind, bool),
    offset: i64,
    layout: Layout,
) -> Description {
    const ALIGNED: usize = 256;
    let size = kind.elt_size_in_bytes() as i64;
    let batch = batches[0].max(batches[1]);
    let matrices = |at: usize, [row, column]: [i64; 2], elements: i64, own: i64| Matrices {
        data: without_provenance(at),
        row,
        column,
        batch: if own == 1 { 0 } else { elements },
    };
    let by_k = layout == Layout::Linear;
    let lhs_strides = if layout == Layout::Transposed { [1, m] } else { [k, 1] };
    let product = Product {
        batch,
        m,
        n,
        k,
        lhs: matrices(ALIGNED + (offset * size) as usize, lhs_strides, m * k, batches[0]),
        rhs: matrices(ALIGNED, if by_k { [1, k] } else { [n, 1] }, k * n, batches[1]),
        bias: match bias {
            Bias::Row => matrices(ALIGNED, [0, 1], 0, 1),
            Bias::Full => matrices(ALIGNED, [n, 1], m * n, batch),
            Bias::None => Matrices { data: null(), ..matrices(ALIGNED, [0, 0], 0, 1) },
        },
        out: null_mut(),
        kind: kind.code(),
        relu: i32::from(layout == Layout::Matrices && bias != Bias::None),
    };
    let (rows, shorts) = (m.max(n), m.min(n));
    let lanes = 16 / size;
    let up = |size: i64| (size + lanes - 1) / lanes * lanes;
    let is_even = |size: i64| size % lanes == 0;
    let [lhs, rhs, out] = [
        batches[0] as f64 * (up(k) * m) as f64,
        batches[1] as f64 * (up(k) * up(n)) as f64,
        batch as f64 * (up(n) * m) as f64,
    ];
    let lhs_row = if layout == Layout::Transposed { m } else { k };
    let rhs_row = if by_k { k } else { n };
    let copies = [
        !is_even(lhs_row) || !is_even(k) || offset % lanes != 0,
        !is_even(rhs_row) || !is_even(k) || !is_even(n),
        !is_even(n),
    ];
    let sizes = [lhs, rhs, out];
    let copied = sizes.iter().zip(copies).filter(|(_, copies)| *copies).map(|(size, _)| size).sum();
    let is_half = product.is_half();
    // Fewer terms would leave most of a block idle.
    let by_tensor = is_half && by_k && k >= 256 && is_even(k) && offset % lanes == 0;
    Description {
        product,
        skinny: match shorts <= if by_tensor { MOST_SHORT_BY_TENSOR } else { MOST_SHORT }
            && layout != Layout::Transposed
        {
            // Of a matrix `[K, N]` with a few rows before it, N is the contiguous dimension.
            true => {
                let by_rows = by_k || n <= m;
                Skinny { rows, shorts, by_rows: by_rows.into(), by_tensor: by_tensor.into() }
            }
            false => Skinny::default(),
        },
        padding: Padding {
            lhs,
            rhs,
            out,
            copied,
            launches: i64::from(copies[0] || copies[1]) + i64::from(copies[2]),
        },
        size: [0; MOST_DIMS],
        dims: 2,
        device: 0,
        tf32,
        small: true,
        hopper: bias == Bias::Full && is_half && is_even(k) && is_even(n) && offset % lanes == 0,
    }
}
