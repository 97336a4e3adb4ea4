//! Tests of random cases.

use super::*;
use proptest::prelude::*;
use support::property::{Case, Property, size, style};
use tch_extension::ops::{f_matmul_add_relu, matmul_add_relu_reference};
use tch_extension::testing::devices;

fn property() -> Property<'static> {
    fn take(inputs: &[Option<Tensor>]) -> [&Tensor; 3] {
        let [Some(lhs), Some(rhs), Some(bias)] = inputs else { unreachable!("three inputs") };
        [lhs, rhs, bias]
    }
    Property {
        name: "matmul_add_relu",
        fused: &|inputs| {
            let [lhs, rhs, bias] = take(inputs);
            f_matmul_add_relu(lhs, rhs, bias).map(|y| vec![y])
        },
        reference: &|inputs| {
            let [lhs, rhs, bias] = take(inputs);
            let y = matmul_add_relu_reference(lhs, rhs, bias)?;
            let is_rough = y.requires_grad()
                && inputs.iter().flatten().any(|input| support::is_half(input.kind()));
            Ok(vec![if is_rough { masked_by_ours(y, lhs, rhs, bias)? } else { y }])
        },
        excluded: &|case| !is_documented(case),
    }
}

/// libtorch's y in half kinds, with the derivative that belongs to our output. Where a product and
/// a bias cancel, libtorch's two roundings can give another sign than our single one, and the
/// derivative is 0 for one sign and 1 for the other. So the ReLU's mask comes from our own output,
/// and the products are computed in f64.
fn masked_by_ours(y: Tensor, lhs: &Tensor, rhs: &Tensor, bias: &Tensor) -> Result<Tensor> {
    // If our operator refuses the inputs, the property itself reports that.
    let Ok(ours) = f_matmul_add_relu(&lhs.detach(), &rhs.detach(), &bias.detach()) else {
        return Ok(y);
    };
    let [lhs, rhs, bias] = [lhs, rhs, bias].map(|input| input.to_kind(Kind::Double));
    let z = lhs.f_matmul(&rhs)?.f_add(&bias)?;
    let masked = z.f_where_self(&ours.f_gt(0.0)?, &z.zeros_like())?;
    // The value is libtorch's; only the derivative follows the mask.
    Ok(y.detach() + (&masked - masked.detach()).f_to_kind(y.kind())?)
}

/// Whether the docs say that this case is accepted: the factors are not scalars and have one
/// floating-point kind, although libtorch accepts others when there is nothing to multiply.
fn is_documented(Case(arguments): &Case) -> bool {
    let [Some(lhs), Some(rhs), Some(_)] = &arguments[..] else { return false };
    lhs.kind == rhs.kind
        && support::KINDS.contains(&lhs.kind)
        && !lhs.size.is_empty()
        && !rhs.size.is_empty()
}

/// How an argument's leading dimensions are made from common ones: how many are left out, and which
/// become 1.
#[derive(Clone, Debug)]
struct Broadcast {
    without: usize,
    ones: Vec<bool>,
}

fn broadcast() -> impl Strategy<Value = Broadcast> {
    (0..4usize, proptest::collection::vec(any::<bool>(), 5))
        .prop_map(|(without, ones)| Broadcast { without, ones })
}

impl Broadcast {
    fn of(&self, size: &[i64]) -> Vec<i64> {
        let left = size.iter().zip(&self.ones).map(|(&size, &one)| if one { 1 } else { size });
        left.skip(self.without.min(size.len())).collect()
    }
}

/// Batches that broadcast, matrices or vectors as factors, and a bias of any shape that broadcasts.
fn cases() -> impl Strategy<Value = Case> {
    let batch = proptest::collection::vec(size(), 0..3);
    let sizes = (batch, size(), size(), size());
    (sizes, [broadcast(), broadcast(), broadcast()], [0..8u8, 0..8u8], style(3)).prop_map(
        |((batch, m, k, n), [left, right, added], [lhs_vector, rhs_vector], style)| {
            let with = |mut batch: Vec<i64>, matrix: &[i64]| {
                batch.extend(matrix);
                batch
            };
            let lhs = if lhs_vector == 7 { vec![k] } else { with(left.of(&batch), &[m, k]) };
            let rhs = if rhs_vector == 7 { vec![k] } else { with(right.of(&batch), &[k, n]) };
            let bias = added.of(&with(batch, &[m, n]));
            style.case(vec![Some(lhs), Some(rhs), Some(bias)])
        },
    )
}

#[test]
fn random_cases() {
    for device in devices() {
        property().holds_for(cases(), 5000, device);
    }
}
