//! Tests of random cases.

use super::*;
use proptest::prelude::*;
use support::property::{Case, Property, size, style};
use tch_extension::ops::{f_linear, linear_reference};
use tch_extension::testing::devices;

fn property() -> Property<'static> {
    fn take(inputs: &[Option<Tensor>]) -> (&Tensor, &Tensor, Option<&Tensor>) {
        let [Some(x), Some(w), b] = inputs else { unreachable!("three inputs") };
        (x, w, b.as_ref())
    }
    Property {
        name: "linear",
        fused: &|inputs| {
            let (x, w, b) = take(inputs);
            f_linear(x, w, b).map(|y| vec![y])
        },
        reference: &|inputs| {
            let (x, w, b) = take(inputs);
            linear_reference(x, w, b).map(|y| vec![y])
        },
        excluded: &|case| !is_documented(case),
    }
}

/// Whether the docs say that linear accepts this case: the weight is a matrix, the bias has one
/// number for each output, and all have one floating-point kind.
fn is_documented(Case(arguments): &Case) -> bool {
    let [Some(x), Some(w), b] = &arguments[..] else { return false };
    let one_kind = arguments.iter().flatten().all(|argument| argument.kind == x.kind);
    let (Some(&features), &[out, columns]) = (x.size.last(), &w.size[..]) else { return false };
    let bias = b.as_ref().is_none_or(|b| b.size == [out]);
    one_kind && support::KINDS.contains(&x.kind) && columns == features && bias
}

fn cases() -> impl Strategy<Value = Case> {
    let lead = proptest::collection::vec(size(), 0..4);
    (lead, size(), size(), any::<bool>(), style(3)).prop_map(
        |(mut x, features, out, bias, style)| {
            x.push(features);
            style.case(vec![Some(x), Some(vec![out, features]), bias.then(|| vec![out])])
        },
    )
}

#[test]
fn random_cases() {
    for device in devices() {
        property().holds_for(cases(), 5000, device);
    }
}
