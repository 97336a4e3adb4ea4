//! Whether `gelu_mlp` computes its activation in the epilogue of the first product. Everything else is
//! computed by the kernels of `csrc/mlp` between the products.

use super::Activation;
use crate::ops::kinds::Kind;

/// The ways to compute the activation of `gelu_mlp`.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The way that was measured to be fastest.
    #[default]
    Automatic,
    /// A product, and a pass that computes a from z.
    Pass,
    /// One call of cuBLASLt that computes z, and a in its epilogue: on CUDA for the half kinds, of the
    /// GELU with tanh.
    Activation,
}

crate::ops::way::ways!(Way);

/// What the plan looks at.
#[derive(Clone, Copy)]
pub(crate) struct Facts {
    pub activation: Activation,
    pub kind: Kind,
    pub is_cuda: bool,
    /// M.
    pub rows: i64,
}

/// Products of at most so many rows may be dot products (`gemm::plan`), which have no epilogue. It was
/// measured for more rows only.
const FEW_ROWS: i64 = 4;

/// Whether a comes from the product's epilogue, if cuBLASLt has it for these tensors and, unless it is
/// forced, their rows begin at multiples of 16 bytes. There it was faster at all of 45 random sizes forward,
/// and in both passes 4 % slower at most; of sizes that were chosen, (4096, 512, 2048) in fp16 was 5 % slower
/// forward (docs/lab/mlp.md). Elsewhere cuBLASLt's kernels with it are slow.
pub(crate) fn takes_epilogue(way: Way, facts: &Facts) -> bool {
    let Facts { activation, kind, is_cuda, rows } = *facts;
    let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
    let has_it = is_cuda && is_half && activation == Activation::GeluTanh;
    has_it
        && match way {
            Way::Automatic => rows > FEW_ROWS,
            Way::Activation => true,
            Way::Pass => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts =
        Facts { activation: Activation::GeluTanh, kind: Kind::BFloat16, is_cuda: true, rows: 5 };

    #[test]
    fn half_kinds_take_the_epilogue_for_tanh() {
        for kind in [Kind::Half, Kind::BFloat16] {
            let of = |way| takes_epilogue(way, &Facts { kind, ..FACTS });
            assert_eq!([Way::Automatic, Way::Activation, Way::Pass].map(of), [true, true, false]);
        }
    }

    #[test]
    fn few_rows_take_it_only_by_force() {
        let facts = Facts { rows: 4, ..FACTS };
        let of = |way| takes_epilogue(way, &facts);
        assert_eq!([Way::Automatic, Way::Activation, Way::Pass].map(of), [false, true, false]);
    }

    #[test]
    fn there_is_no_epilogue_for_anything_else() {
        let others = [Activation::Gelu, Activation::ReluSquared, Activation::Silu];
        let others = others.map(|activation| Facts { activation, ..FACTS });
        let kinds = [Kind::Float, Kind::Double].map(|kind| Facts { kind, ..FACTS });
        let cpu = [Facts { is_cuda: false, ..FACTS }];
        for facts in others.iter().chain(&kinds).chain(&cpu) {
            for way in [Way::Automatic, Way::Pass, Way::Activation] {
                assert!(!takes_epilogue(way, facts));
            }
        }
    }
}
