//! Tests the time of a call compared with the dispatcher's own time.

use super::*;
use std::time::Instant;

#[test]
fn a_handle_adds_at_most_a_microsecond() {
    const CALLS: i32 = 2000;
    let (op, own, x) = (operator("same"), operator("time_of_same"), doubles(&[1.0]));
    // The best of many rounds, because other tests run at the same time.
    let (mut ours, mut dispatchers) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..30 {
        dispatchers = dispatchers.min(own.call(args![&x, CALLS]).unwrap());
        let start = Instant::now();
        for _ in 0..CALLS {
            let _: Tensor = op.call(args![&x]).unwrap();
        }
        ours = ours.min(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
    }
    eprintln!("a call: {ours:.0} ns; the dispatcher's own callBoxed: {dispatchers:.0} ns");
    assert!(ours - dispatchers <= 1000.0, "{ours} ns, and {dispatchers} ns without the handle");
}
