//! Random calls.

use super::*;
use proptest::prelude::*;
use support::property::{Argument, Case as RandomCase, Property, size, style};

fn take(inputs: &[Option<Tensor>]) -> [&Tensor; 4] {
    let [Some(q), Some(k), Some(cos), Some(sin)] = inputs else { unreachable!("four inputs") };
    [q, k, cos, sin]
}

fn is_documented(RandomCase(arguments): &RandomCase) -> bool {
    let arguments: Vec<&Argument> = arguments.iter().flatten().collect();
    let [q, k, cos, sin] = arguments[..] else { return false };
    let (&[b, t, _, d], &[bk, tk, _, dk]) = (&q.size[..], &k.size[..]) else { return false };
    let &[positions, pairs] = &cos.size[..] else { return false };
    KINDS.contains(&q.kind)
        && k.kind == q.kind
        && (b, t, d) == (bk, tk, dk)
        && [q.kind, Kind::Float].contains(&cos.kind)
        && (cos.kind, &cos.size) == (sin.kind, &sin.size)
        && positions >= OFFSET + t
        && 2 * pairs <= d
}

#[test]
fn random_cases() {
    for (device, interleaved) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let sizes = ((size(), size(), size(), size(), size()), 0..3i64, any::<bool>(), style(4));
        let cases = sizes.prop_map(|((b, t, h, hk, d), rest, is_float, style)| {
            let table = Some(vec![t + OFFSET, (d - rest).max(0) / 2]);
            let (q, k) = (Some(vec![b, t, h, d]), Some(vec![b, t, hk, d]));
            let RandomCase(mut arguments) = style.case(vec![q, k, table.clone(), table]);
            if is_float {
                arguments[2..].iter_mut().flatten().for_each(|table| table.kind = Kind::Float);
            }
            RandomCase(arguments)
        });
        let options = RopeOptions { interleaved, offset: OFFSET, ..Default::default() };
        let call = |op: Op, inputs: &[Option<Tensor>]| {
            let [q, k, cos, sin] = take(inputs);
            op(q, k, cos, sin, &options).map(|(q, k)| vec![q, k])
        };
        let property = Property {
            name: "rope",
            fused: &|inputs| call(f_rope, inputs),
            reference: &|inputs| call(rope_reference, inputs),
            excluded: &|case| !is_documented(case),
        };
        property.holds_for(cases, if device.is_cuda() { 1000 } else { 2500 }, device);
    }
}
