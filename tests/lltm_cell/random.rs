//! Tests of random cases.

use super::*;
use proptest::prelude::*;
use support::property::{Argument, Case, Property, size, style};

fn take(inputs: &[Option<Tensor>]) -> (&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) {
    let [Some(x), Some(w), b, Some(h), Some(c)] = inputs else { unreachable!("five inputs") };
    (x, w, b.as_ref(), (h, c))
}

fn property() -> Property<'static> {
    Property {
        name: "lltm_cell",
        fused: &|inputs| {
            let (x, w, b, state) = take(inputs);
            f_lltm_cell(x, w, b, state).map(|(h, c)| vec![h, c])
        },
        reference: &|inputs| {
            let (x, w, b, state) = take(inputs);
            lltm_cell_reference(x, w, b, state).map(|(h, c)| vec![h, c])
        },
        excluded: &|case| !is_documented(case),
    }
}

/// Whether the docs say that lltm_cell accepts this case: exact shapes of floating-point kinds. The
/// reference broadcasts.
fn is_documented(Case(arguments): &Case) -> bool {
    let [Some(x), Some(w), b, Some(h), Some(c)] = &arguments[..] else { return false };
    let present: Vec<&Argument> = arguments.iter().flatten().collect();
    let floating = present.iter().all(|argument| KINDS.contains(&argument.kind));
    let (&[batch, features], &[_, hidden]) = (&x.size[..], &h.size[..]) else { return false };
    let bias = b.as_ref().is_none_or(|b| b.size == [3 * hidden] || b.size == [1, 3 * hidden]);
    let state = h.size == [batch, hidden] && c.size == [batch, hidden];
    floating && bias && state && w.size == [3 * hidden, hidden + features]
}

fn cases() -> impl Strategy<Value = Case> {
    (size(), size(), size(), 0..3usize, style(5)).prop_map(|(b, f, h, bias, style)| {
        let bias = [None, Some(vec![3 * h]), Some(vec![1, 3 * h])][bias].clone();
        style.case(vec![
            Some(vec![b, f]),
            Some(vec![3 * h, h + f]),
            bias,
            Some(vec![b, h]),
            Some(vec![b, h]),
        ])
    })
}

#[test]
fn random_cases() {
    for device in devices() {
        property().holds_for(cases(), 5000, device);
    }
}

/// Checks that the random test can fail, because a test that cannot fail says nothing.
#[test]
fn random_cases_find_a_fault_and_print_it() {
    let broken = Property {
        fused: &|inputs| {
            let (x, w, b, state) = take(inputs);
            let (h, c) = f_lltm_cell(x, w, b, state)?;
            // This result is wrong for misaligned states.
            let wrong = h.size()[1] > 2 && state.0.data_ptr() as usize % 16 == 8;
            Ok(vec![if wrong { h + 1.0 } else { h }, c])
        },
        ..property()
    };
    let text = broken.try_cases(cases(), 5000, Device::Cpu).expect_err("a fault");
    assert!(text.contains("output 0: assert_close"), "{text}");
    assert!(
        text.contains(
            "fn found_by_random_cases() {\n    let case = Case(vec![\n        Some(Argument {"
        ),
        "{text}"
    );
    // The failing case was shrunk to one row of three columns, the fewest that show the fault.
    assert!(text.contains("size: vec![1, 3], kind: Kind::Double"), "{text}");
}
