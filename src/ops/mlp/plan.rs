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
    /// H.
    pub hidden: i64,
}

/// From this many elements of `[M, H]` on, the epilogue was measured to be faster. In a half kind they
/// are 20 MB, so z and a together no longer fit into the cache that the pass would read z from.
const FEWEST: i64 = 10_000_000;

/// Whether a comes from the product's epilogue, if cuBLASLt has it for these tensors and, unless it is
/// forced, their rows begin at multiples of 16 bytes.
pub(crate) fn takes_epilogue(way: Way, facts: &Facts) -> bool {
    let Facts { activation, kind, is_cuda, rows, hidden } = *facts;
    let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
    let exists = is_cuda && is_half && activation == Activation::GeluTanh;
    let is_wanted = match way {
        Way::Automatic => rows.saturating_mul(hidden) >= FEWEST,
        Way::Pass => false,
        Way::Activation => true,
    };
    exists && is_wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    const FACTS: Facts = Facts {
        activation: Activation::GeluTanh,
        kind: Kind::BFloat16,
        is_cuda: true,
        rows: 4096,
        hidden: 3072,
    };

    /// The sizes that were measured (docs/lab/mlp.md).
    #[test]
    fn large_activations_are_computed_in_the_epilogue() {
        for kind in [Kind::Half, Kind::BFloat16] {
            for (rows, hidden, expected) in [
                (512, 3072, false),
                (4096, 2048, false),
                (4096, 3072, true),
                (16_384, 1536, true),
                (16_384, 3072, true),
                (8192, 8192, true),
                (8192, 16_384, true),
                (0, 0, false),
                (i64::MAX, i64::MAX, true),
            ] {
                let facts = Facts { kind, rows, hidden, ..FACTS };
                assert_eq!(takes_epilogue(Way::Automatic, &facts), expected, "{rows} {hidden}");
                assert!(takes_epilogue(Way::Activation, &facts));
                assert!(!takes_epilogue(Way::Pass, &facts));
            }
        }
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
