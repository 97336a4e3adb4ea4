//! What is refused, and random calls.

use super::*;
use proptest::prelude::*;
use support::property::{Case as RandomCase, Property, size, style};
use support::refusal::assert_refused;

/// Whether the docs say that the operator accepts this case.
fn is_documented(RandomCase(arguments): &RandomCase) -> bool {
    let [Some(x), Some(gate), Some(up), Some(down)] = &arguments[..] else { return false };
    let one_kind = arguments.iter().flatten().all(|argument| argument.kind == x.kind);
    let (Some(&d), &[h, features], &[_, hidden]) = (x.size.last(), &gate.size[..], &down.size[..])
    else {
        return false;
    };
    one_kind && KINDS.contains(&x.kind) && features == d && hidden == h && up.size == gate.size
}

#[test]
fn random_cases() {
    fn take(inputs: &[Option<Tensor>]) -> [&Tensor; 4] {
        let [Some(x), Some(gate), Some(up), Some(down)] = inputs else { unreachable!("four") };
        [x, gate, up, down]
    }
    let lead = proptest::collection::vec(size(), 0..3);
    let cases = (lead, size(), size(), size(), style(4)).prop_map(|(mut x, d, h, e, style)| {
        x.push(d);
        style.case(vec![Some(x), Some(vec![h, d]), Some(vec![h, d]), Some(vec![e, h])])
    });
    for device in devices() {
        for options in BOTH {
            let property = Property {
                name: "swiglu_mlp",
                fused: &|inputs| {
                    let [x, gate, up, down] = take(inputs);
                    Ok(vec![f_swiglu_mlp(x, gate, up, down, &options)?])
                },
                reference: &|inputs| {
                    let [x, gate, up, down] = take(inputs);
                    Ok(vec![swiglu_mlp_reference(x, gate, up, down)?])
                },
                excluded: &|case| !is_documented(case),
            };
            property.holds_for(&cases, if device.is_cuda() { 600 } else { 1500 }, device);
        }
    }
}

#[test]
fn bad_arguments_are_named() {
    let names = ["input", "w_gate", "w_up", "w_down"];
    for device in devices() {
        let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let float = |size: &[i64]| of(size, Kind::Float);
        let good = || [float(&[2, 4]), float(&[6, 4]), float(&[6, 4]), float(&[3, 6])];
        let cases: Vec<(usize, Tensor, &[&str])> = vec![
            (0, float(&[]), &["shape [..., D]", "view it as [1]"]),
            (0, of(&[2, 4], Kind::Int64), &["kind Float or Double or Half or BFloat16", "Int64"]),
            (0, Tensor::new(), &["a tensor", "undefined"]),
            (1, float(&[6, 5]), &["[H, D] = [6, 4]", "[6, 5]"]),
            (1, float(&[6]), &["2 dimensions [H, D]", "[6]"]),
            (1, of(&[6, 4], Kind::Half), &["kind Float, as input", "Half"]),
            (2, float(&[5, 4]), &["[H, D] = [6, 4]", "[5, 4]"]),
            (2, of(&[6, 4], Kind::Double), &["kind Float, as input", "Double"]),
            (2, Tensor::new(), &["a tensor", "undefined"]),
            (3, float(&[3, 5]), &["[D2, H] = [3, 6]", "[3, 5]"]),
            (3, float(&[6]), &["2 dimensions [D2, H]", "[6]"]),
            (3, of(&[3, 6], Kind::BFloat16), &["kind Float, as input", "BFloat16"]),
        ];
        for (index, bad, texts) in cases {
            let mut arguments = good();
            arguments[index] = bad;
            let place = format!("swiglu_mlp: {}", names[index]);
            let result = call(&fused(BOTH[0]), &arguments);
            let panicking = std::panic::AssertUnwindSafe(|| {
                let [x, gate, up, down] = &arguments;
                swiglu_mlp(x, gate, up, down, &BOTH[0])
            });
            assert_refused(&place, texts, result, panicking);
        }
        assert_eq!(call(&fused(BOTH[0]), &good()).expect("good arguments").size(), [2, 3]);
    }
}
