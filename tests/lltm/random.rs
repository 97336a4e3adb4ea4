//! Tests of random cases.

use super::*;
use proptest::prelude::*;
use support::property::{Argument, Case, Property, size, style};
use tch_extension::testing::Layout;

type Arguments<'a> = (&'a Tensor, &'a Tensor, Option<&'a Tensor>, (&'a Tensor, &'a Tensor));

fn take(inputs: &[Option<Tensor>]) -> Arguments<'_> {
    let [Some(x), Some(w), b, Some(h), Some(c)] = inputs else { unreachable!("five inputs") };
    (x, w, b.as_ref(), (h, c))
}

fn property(way: RnnWay) -> Property<'static> {
    let by: support::property::Call<'static> = match way {
        RnnWay::Step => &|inputs| run(RnnWay::Step, inputs),
        _ => &|inputs| run(RnnWay::Automatic, inputs),
    };
    Property {
        name: "lltm",
        fused: by,
        reference: &by_reference,
        excluded: &|case| !is_documented(case),
    }
}

/// A property with small weights, which do not amplify rounding errors over many steps.
fn property_of_many_steps(way: RnnWay) -> Property<'static> {
    let by: support::property::Call<'static> = match way {
        RnnWay::Resident => &|inputs| run(RnnWay::Resident, &with_small_weights(inputs)),
        RnnWay::Grid => &|inputs| run(RnnWay::Grid, &with_small_weights(inputs)),
        _ => &|inputs| run(RnnWay::Automatic, &with_small_weights(inputs)),
    };
    Property {
        fused: by,
        reference: &|inputs| by_reference(&with_small_weights(inputs)),
        ..property(way)
    }
}

fn by_reference(inputs: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
    let (x, w, b, state) = take(inputs);
    lltm_reference(x, w, b, state).map(|(output, (h, c))| vec![output, h, c])
}

fn with_small_weights(inputs: &[Option<Tensor>]) -> Vec<Option<Tensor>> {
    // This number is exact in every kind.
    const SMALL: f64 = 1.0 / 16.0;
    let mut inputs: Vec<_> =
        inputs.iter().map(|input| input.as_ref().map(Tensor::shallow_clone)).collect();
    inputs[1] = inputs[1]
        .take()
        .map(|weight| if KINDS.contains(&weight.kind()) { weight * SMALL } else { weight });
    inputs
}

fn run(way: RnnWay, inputs: &[Option<Tensor>]) -> Result<Vec<Tensor>> {
    let (x, w, b, state) = take(inputs);
    force(way, || f_lltm(x, w, b, state)).map(|(output, (h, c))| vec![output, h, c])
}

/// Whether the docs say that lltm accepts this case: exact shapes of floating-point kinds, and
/// a weight of the kind of the products. The reference broadcasts, and checks one step after
/// another.
fn is_documented(Case(arguments): &Case) -> bool {
    let [Some(x), Some(w), b, Some(h), Some(c)] = &arguments[..] else { return false };
    let present: Vec<&Argument> = arguments.iter().flatten().collect();
    let floating = present.iter().all(|argument| KINDS.contains(&argument.kind));
    let (&[_, batch, features], &[_, hidden]) = (&x.size[..], &h.size[..]) else { return false };
    let bias = b.as_ref().is_none_or(|b| b.size == [3 * hidden] || b.size == [1, 3 * hidden]);
    let state = h.size == [batch, hidden] && c.size == [batch, hidden];
    let zeros = |kind| Tensor::zeros([], (kind, Device::Cpu)).unsqueeze(0);
    let product = (zeros(x.kind) + zeros(h.kind)).kind();
    let kinds = w.kind == product && b.as_ref().is_none_or(|b| b.kind == product);
    floating && kinds && bias && state && w.size == [3 * hidden, hidden + features]
}

fn cases() -> impl Strategy<Value = Case> {
    (0..5i64, size(), size(), size(), 0..3usize, style(5)).prop_map(|(t, b, f, h, bias, style)| {
        let bias = [None, Some(vec![3 * h]), Some(vec![1, 3 * h])][bias].clone();
        let sizes = vec![
            Some(vec![t, b, f]),
            Some(vec![3 * h, h + f]),
            bias,
            Some(vec![b, h]),
            Some(vec![b, h]),
        ];
        style.case(sizes)
    })
}

/// Cases with enough steps for one kernel for all of them, and with hidden sizes that such kernels
/// have: any size in clusters, multiples of 8 in a grid.
fn cases_of_many_steps() -> impl Strategy<Value = Case> {
    (8..12i64, 1..20i64, size(), 1..37i64, 0..2usize, style(5)).prop_map(
        |(t, b, f, h, eighths, style)| {
            let h = if eighths == 1 { h * 8 } else { h };
            let sizes = vec![
                Some(vec![t, b, f]),
                Some(vec![3 * h, h + f]),
                Some(vec![3 * h]),
                Some(vec![b, h]),
                Some(vec![b, h]),
            ];
            style.case(sizes)
        },
    )
}

#[test]
fn random_cases_of_many_steps() {
    for device in devices() {
        let ways: &[RnnWay] = match device.is_cuda() {
            true => &[RnnWay::Automatic, RnnWay::Resident, RnnWay::Grid],
            false => &[RnnWay::Automatic],
        };
        let count = if device.is_cuda() { 300 } else { 80 };
        for &way in ways {
            property_of_many_steps(way).holds_for(cases_of_many_steps(), count, device);
        }
    }
}

#[test]
fn random_cases() {
    for device in devices() {
        property(RnnWay::Automatic).holds_for(cases(), 2500, device);
    }
}

/// This case was found on a GPU: over four steps, the reference's rounding errors grow so much that
/// it is off by half of a value, and ours is not.
#[test]
fn roundings_that_grow_from_step_to_step() {
    let argument = |size: &[i64], requires_grad| {
        let (size, layout) = (size.to_vec(), Layout::Contiguous);
        Some(Argument { size, kind: Kind::BFloat16, layout, requires_grad })
    };
    let case = Case(vec![
        argument(&[4, 4, 3], false),
        argument(&[99, 36], false),
        None,
        argument(&[4, 33], true),
        argument(&[4, 33], false),
    ]);
    for device in devices() {
        property(RnnWay::Automatic).check(&case, device).unwrap();
    }
}

#[test]
fn random_cases_per_step() {
    property(RnnWay::Step).holds_for(cases(), 1500, Device::Cpu);
}
