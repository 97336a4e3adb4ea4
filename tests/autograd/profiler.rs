//! Tests of operators under a profiler: forward and backward are recorded by name, and a sequence
//! number links them.

use super::*;
use tch_extension::testing::recorded;

#[test]
fn forward_and_backward_are_recorded_by_name() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let (y, events) = recorded(|| square(&x));
    let find =
        |events: &[(String, i64)], name: &str| events.iter().find(|event| event.0 == name).cloned();
    let forward = find(&events, "square").expect("the forward");
    let (_, events) = recorded(|| gradient_of(&y, &x).expect("gradient"));
    let backward = find(&events, "squareBackward").expect("the backward");
    assert_eq!(forward.1, backward.1, "the sequence number links the two");
    let (_, events) = recorded(|| tch::no_grad(|| square(&x)));
    assert!(find(&events, "square").is_some(), "without a graph, too");
    // `recorded` panics unless every record ends, even if the forward fails.
    let fails = || op(|_, _| Err(Error::msg("out of luck")), |_, _| unreachable!("it failed"));
    let (outcome, events) = recorded(|| apply(fails(), &[Some(&x)]));
    assert!(outcome.is_err() && find(&events, "op").is_some());
    let panics = || op(|_, _| panic!("boom"), |_, _| unreachable!("it panicked"));
    let caught =
        || std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| apply(panics(), &[Some(&x)])));
    let (outcome, events) = recorded(caught);
    assert!(outcome.is_err() && find(&events, "op").is_some());
}
