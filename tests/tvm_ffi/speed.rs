//! The time of a call.

use super::*;
use std::time::Instant;

/// The best of many rounds, in ns for a call, because other tests run at the same time.
fn best(calls: u32, mut round: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..40 {
        let start = Instant::now();
        (0..calls).for_each(|_| round());
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(calls));
    }
    best
}

#[test]
fn a_call_adds_little_to_its_function() {
    let Some(module) = module("a_call_adds_little_to_its_function") else { return };
    let of = |name: &str| module.function(name).unwrap();
    let (add, alloc, time) = (of("add_one"), of("add_one_alloc"), of("time_of_add_one"));
    let (x, mut y) = (floats(&[1.0, 2.0]), floats(&[0.0; 2]));
    let direct = (0..40).map(|_| {
        let calls: f64 = time.call(args![&x, out(&mut y), 2000]).unwrap();
        calls
    });
    let direct = direct.fold(f64::INFINITY, f64::min);
    let called = best(2000, || call(&add, args![&x, out(&mut y)]).unwrap());
    let empty = best(2000, || drop(Tensor::empty([2], (Kind::Float, Device::Cpu))));
    let returned = best(2000, || drop(alloc.call::<Tensor>(args![&x]).unwrap()));
    eprintln!(
        "direct {direct:.0} ns, called {called:.0} ns; empty {empty:.0} ns, returned {returned:.0} ns"
    );
    // docs/performance.md has the figures of an optimized test on a quiet machine.
    assert!(called - direct <= 500.0, "{called} ns, and {direct} ns in C");
    assert!(returned - empty <= 1500.0, "{returned} ns, and {empty} ns for an empty tensor");
}
