//! Which products of a layer of `Float` on CUDA are in tf32, where libtorch allows it.

use crate::Result;
use crate::ffi::precision::rnn_allow_tf32;
use crate::ops::kinds::Kind;
use crate::ops::recurrent::plan::{Direction, Sizes, Way};

/// cuDNN takes tf32 in some products and `Float` in others, by heuristics that are not documented. A
/// layer of ours rounds only where cuDNN's did at every one of 13 000 sizes on an H100
/// (docs/lab/lstm.md), so that it is as exact as libtorch's at every size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tf32 {
    /// Whether libtorch's switch for recurrent layers allows it.
    pub is_allowed: bool,
    /// The product with h in each step, of scaled fp16 values, in the forward pass.
    pub forward: bool,
    /// The same in the backward pass.
    pub backward: bool,
    /// The product with the input, and the one for its gradient.
    pub input: bool,
    /// The products for the gradients of weights.
    pub weights: bool,
}

impl Tf32 {
    pub const NONE: Tf32 =
        Tf32 { is_allowed: false, forward: false, backward: false, input: false, weights: false };
    pub const ALL: Tf32 =
        Tf32 { is_allowed: true, forward: true, backward: true, input: true, weights: true };

    /// For a layer of this kind on CUDA, computed this way. Kernels that multiply scaled fp16 values
    /// take all sizes where tests force them.
    pub fn of_layer(way: Way, kind: Kind, sizes: Sizes) -> Result<Tf32> {
        if kind != Kind::Float || !rnn_allow_tf32()? {
            return Ok(Tf32::NONE);
        }
        Ok(Tf32::on(way, sizes))
    }

    /// The same where it is allowed.
    pub fn on(way: Way, sizes: Sizes) -> Tf32 {
        match way {
            Way::Resident | Way::Cluster | Way::Grid | Way::WideGrid | Way::CrowdedGrid => {
                Tf32::ALL
            }
            _ => Tf32::where_allowed(sizes),
        }
    }

    /// Whether the product with h in each step is in tf32.
    pub fn steps(self, direction: Direction) -> bool {
        match direction {
            Direction::Forward => self.forward,
            Direction::Backward => self.backward,
        }
    }

    /// Where the switch allows it: as cuDNN does.
    pub fn where_allowed(Sizes { steps, batch, features, hidden }: Sizes) -> Tf32 {
        /// The values of 16 bytes.
        const VECTOR: i64 = 4;
        /// With fewer rows over all steps, or fewer columns, a product may be no matrix product.
        const ROWS: i64 = 64;
        const COLUMNS: i64 = 64;
        const FEATURES: i64 = 128;
        /// Up to these H libtorch asks for cuDNN's kernels that keep the weights on the chip, which
        /// multiply `Float`, forward and backward.
        const SMALL: [i64; 2] = [192, 128];
        /// A step with this few rows, and not many more columns, is also in `Float`.
        const FEW_ROWS: i64 = 16;
        const FEW_COLUMNS: i64 = 320;
        let is_aligned = features % VECTOR == 0 && hidden % VECTOR == 0;
        let rounds = is_aligned && steps.saturating_mul(batch) >= ROWS;
        let is_matrix = hidden > FEW_COLUMNS || batch > FEW_ROWS;
        Tf32 {
            is_allowed: true,
            forward: rounds && batch > 1 && hidden > SMALL[0] && is_matrix,
            backward: rounds && batch > 1 && hidden > SMALL[1],
            input: rounds && features >= FEATURES && hidden >= COLUMNS,
            weights: rounds,
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
            let Tf32 { is_allowed, forward, backward, input, weights } = Tf32::where_allowed(sizes);
            assert!(is_allowed);
            [forward, backward, input, weights]
        };
        for sizes in [[20, 64, 508, 508], [30, 250, 1024, 1020], [8, 16, 512, 512]] {
            assert_eq!(of(sizes), [true; 4], "{sizes:?}");
        }
        // Small weights stay on the chip, longer in the forward pass; so does a step of few rows.
        assert_eq!(of([50, 128, 128, 128]), [false, false, true, true]);
        assert_eq!(of([50, 128, 128, 192]), [false, true, true, true]);
        assert_eq!(of([50, 128, 128, 196]), [true; 4]);
        assert_eq!([of([40, 16, 64, 304]), of([40, 12, 64, 240])], [[false, true, false, true]; 2]);
        assert_eq!(of([20, 1, 512, 512]), [false; 4]);
        assert_eq!(of([64, 1, 512, 512]), [false, false, true, true]);
        // cuDNN multiplies these in `Float`, at least forward.
        for sizes in [
            [333, 5, 33, 72],
            [62, 70, 13, 16],
            [34, 13, 59, 208],
            [3, 86, 85, 147],
            [15, 1, 220, 179],
            [23, 16, 53, 264],
            [118, 58, 8, 107],
            [3, 3, 152, 432],
        ] {
            assert_eq!(of(sizes), [false; 4], "{sizes:?}");
        }
    }
}
