//! Which products of a layer of `Float` on CUDA are in tf32, where libtorch allows it.

use super::plan::Way;
use crate::Result;
use crate::ffi::precision::rnn_allow_tf32;
use crate::ops::recurrent::plan::Sizes;
use tch::Kind;

/// cuDNN takes tf32 in some products and `Float` in others, by rules that are not documented. Seen in
/// 314 layers on an H100 (docs/lab/lstm.md), it rounds wherever rows begin at 16 bytes and there is
/// enough to multiply; elsewhere it may, and does not for some sizes. A layer of ours rounds only
/// where cuDNN's surely does, so that it is as exact as libtorch's at every size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tf32 {
    /// Whether libtorch's switch for recurrent layers allows it.
    pub is_allowed: bool,
    /// The product with h in each step, of scaled fp16 values.
    pub steps: bool,
    /// The product with the input, and the one for its gradient.
    pub input: bool,
    /// The products for the gradients of weights.
    pub weights: bool,
}

impl Tf32 {
    pub const NONE: Tf32 = Tf32 { is_allowed: false, steps: false, input: false, weights: false };
    pub const ALL: Tf32 = Tf32 { is_allowed: true, steps: true, input: true, weights: true };

    /// For a layer of this kind on CUDA, computed this way. Kernels that multiply scaled fp16 values
    /// take all sizes where tests force them.
    pub fn of_layer(way: Way, kind: Kind, sizes: Sizes) -> Result<Tf32> {
        if kind != Kind::Float || !rnn_allow_tf32()? {
            return Ok(Tf32::NONE);
        }
        Ok(match way {
            Way::Cluster | Way::Grid | Way::WideGrid | Way::CrowdedGrid => Tf32::ALL,
            _ => Tf32::as_cudnn(sizes),
        })
    }

    /// Where it is allowed.
    fn as_cudnn(Sizes { steps, batch, features, hidden }: Sizes) -> Tf32 {
        /// The values of 16 bytes.
        const VECTOR: i64 = 4;
        /// With sums of fewer terms, tf32 may make a product no faster.
        const TERMS: i64 = 64;
        /// Up to this H cuDNN keeps the weights on the chip, and multiplies `Float` there.
        const SMALL: i64 = 128;
        /// With fewer rows a step multiplies a matrix by a few vectors.
        const ROWS: i64 = 8;
        let is_aligned = features % VECTOR == 0 && hidden % VECTOR == 0;
        let input = is_aligned && features >= TERMS && hidden >= TERMS;
        Tf32 {
            is_allowed: true,
            steps: input || is_aligned && hidden > SMALL && batch >= ROWS,
            input,
            weights: is_aligned && steps.saturating_mul(batch) >= TERMS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn we_round_where_cudnn_does() {
        let of = |[steps, batch, features, hidden]: [i64; 4]| {
            let sizes = Sizes { steps, batch, features, hidden };
            let Tf32 { is_allowed, steps, input, weights } = Tf32::as_cudnn(sizes);
            assert!(is_allowed);
            [steps, input, weights]
        };
        for sizes in
            [[50, 128, 100, 100], [20, 64, 508, 508], [30, 250, 1024, 1020], [1, 64, 512, 512]]
        {
            assert_eq!(of(sizes), [true; 3], "{sizes:?}");
        }
        // Too few features, or steps and rows, for a product over all steps.
        assert_eq!([of([55, 33, 16, 184]), of([6, 48, 24, 336])], [[true, false, true]; 2]);
        assert_eq!([of([1, 7, 64, 64]), of([20, 1, 512, 512])], [[true, true, false]; 2]);
        // cuDNN multiplies these in `Float`, at least forward; only the gradients of aligned weights are
        // always in tf32.
        for sizes in [
            [333, 5, 33, 72],
            [62, 70, 13, 16],
            [34, 13, 59, 208],
            [3, 86, 85, 147],
            [48, 33, 62, 26],
            [15, 1, 220, 179],
            [23, 16, 53, 264],
            [57, 53, 173, 24],
            [37, 124, 42, 46],
            [98, 110, 23, 16],
            [118, 58, 8, 107],
            [103, 27, 43, 168],
        ] {
            assert_eq!(of(sizes), [false; 3], "{sizes:?}");
        }
        for sizes in [[20, 64, 32, 32], [20, 67, 40, 36]] {
            assert_eq!(of(sizes), [false, false, true], "{sizes:?}");
        }
    }
}
