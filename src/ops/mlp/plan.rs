//! Which parts of `gelu_mlp` cuBLASLt computes in the epilogues of its products. Everything else is
//! computed by the kernels of `csrc/mlp` between the products.

use super::Activation;
use tch::Kind;

/// The ways to compute `gelu_mlp`. Each names the epilogues that are used where they exist: on CUDA for
/// the half kinds, those with a GELU for the one with tanh.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The epilogues that were measured to be faster.
    #[default]
    Automatic,
    /// No epilogue: products, and passes between them.
    Pass,
    /// z and a in the epilogue of the first product.
    Activation,
    /// dz and db₁ in the epilogue of the product for da.
    Derivative,
    /// db₂ in the epilogue of the product for dW₂.
    BiasGradient,
    /// All of them.
    Epilogues,
}

crate::ops::way::ways!(Way);

/// Which epilogues are used where they exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// a, and z if it is kept, with the first product.
    pub activation: bool,
    /// dz and db₁ with the product for da.
    pub derivative: bool,
    /// db₂ with the product for dW₂.
    pub bias_gradient: bool,
}

impl Plan {
    /// The plan for tensors of this kind.
    pub fn new(way: Way, activation: Activation, kind: Kind, is_cuda: bool) -> Self {
        let is_half = matches!(kind, Kind::Half | Kind::BFloat16);
        if !is_cuda || !is_half {
            return Plan::default();
        }
        let has_gelu = activation == Activation::GeluTanh;
        let of = |ways: &[Way]| ways.contains(&way);
        // Nothing was measured yet, so that the plan takes no epilogue by itself.
        Plan {
            activation: has_gelu && of(&[Way::Activation, Way::Epilogues]),
            derivative: has_gelu && of(&[Way::Derivative, Way::Epilogues]),
            bias_gradient: of(&[Way::BiasGradient, Way::Epilogues]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epilogues_are_used_where_they_exist() {
        let plan = |way, activation, kind, is_cuda| Plan::new(way, activation, kind, is_cuda);
        let none = Plan::default();
        let all = Plan { activation: true, derivative: true, bias_gradient: true };
        for kind in [Kind::Half, Kind::BFloat16] {
            let on_cuda = |way| plan(way, Activation::GeluTanh, kind, true);
            assert_eq!(on_cuda(Way::Epilogues), all);
            assert_eq!(on_cuda(Way::Pass), none);
            assert_eq!(on_cuda(Way::Activation), Plan { activation: true, ..none });
            assert_eq!(on_cuda(Way::Derivative), Plan { derivative: true, ..none });
            assert_eq!(on_cuda(Way::BiasGradient), Plan { bias_gradient: true, ..none });
            for activation in [Activation::Gelu, Activation::ReluSquared, Activation::Silu] {
                let found = plan(Way::Epilogues, activation, kind, true);
                assert_eq!(found, Plan { bias_gradient: true, ..none });
            }
            assert_eq!(plan(Way::Epilogues, Activation::GeluTanh, kind, false), none);
        }
        for kind in [Kind::Float, Kind::Double] {
            assert_eq!(plan(Way::Epilogues, Activation::GeluTanh, kind, true), none);
        }
    }
}
