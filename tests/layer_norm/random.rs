//! Tests of random cases.

use super::*;
use proptest::prelude::*;
use support::property::{Case, Property, size, style};
use tch_extension::ops::{f_layer_norm, layer_norm_reference};
use tch_extension::testing::devices;

const EPS: f64 = 1e-3;

/// x, w?, b?, and a tensor whose shape is the normalised shape; its values are not used.
fn take(inputs: &[Option<Tensor>]) -> (&Tensor, Option<&Tensor>, Option<&Tensor>, Vec<i64>) {
    let [Some(x), w, b, Some(shape)] = inputs else { unreachable!("four inputs") };
    (x, w.as_ref(), b.as_ref(), shape.size())
}

fn property(device: Device) -> Property<'static> {
    Property {
        name: "layer_norm",
        fused: &|inputs| {
            let (x, w, b, shape) = take(inputs);
            f_layer_norm(x, &shape, w, b, EPS).map(|y| vec![y])
        },
        // libtorch's own operator decides which inputs are refused. It sums the half kinds'
        // gradients too inaccurately to compare the values.
        reference: &|inputs| {
            let (x, w, b, shape) = take(inputs);
            let kind = x.f_layer_norm(shape.as_slice(), w, b, EPS, false)?.kind();
            let reference = layer_norm_reference(x, &shape, w, b, EPS)?;
            assert_eq!(reference.kind(), kind);
            Ok(vec![reference])
        },
        excluded: if device == Device::Cpu { &|_| false } else { &nothing_of_other_kinds },
    }
}

/// Without elements, libtorch's CUDA kernel accepts any mixture of kinds.
fn nothing_of_other_kinds(Case(arguments): &Case) -> bool {
    let [Some(x), w, b, _] = &arguments[..] else { return false };
    let mixed = [w, b].into_iter().flatten().any(|argument| argument.kind != x.kind);
    x.size.contains(&0) && (mixed || !support::KINDS.contains(&x.kind))
}

fn cases() -> impl Strategy<Value = Case> {
    let lead = proptest::collection::vec(size(), 0..3);
    let normal = proptest::collection::vec(size(), 1..3);
    (lead, normal, any::<bool>(), any::<bool>(), style(4)).prop_map(
        |(mut x, normal, w, b, style)| {
            x.extend(&normal);
            let part = |present: bool| present.then(|| normal.clone());
            style.case(vec![Some(x), part(w), part(b), Some(normal.clone())])
        },
    )
}

#[test]
fn random_cases() {
    for device in devices() {
        property(device).holds_for(cases(), 5000, device);
    }
}
