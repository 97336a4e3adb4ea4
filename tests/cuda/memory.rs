//! Memory statistics.

use super::*;
use support::gpu::caching_or_skip;

#[test]
fn cuda_memory_statistics_go_up_and_down() {
    let Some(device) = caching_or_skip("cuda_memory_statistics_go_up_and_down") else { return };
    let _serial = serially();
    // This is larger than any free part of a segment that other tests may leave, so it gets a
    // segment of its own.
    let bytes = 1 << 30;
    let stats = || memory_stats(device).expect("statistics");
    reset_peak_memory_stats(device).expect("reset");
    let before = stats();
    let tensor = Tensor::zeros([bytes / 4], (Kind::Float, device));
    let during = stats();
    assert!(during.allocated >= before.allocated + bytes as u64, "{before:?} {during:?}");
    assert!(during.reserved >= during.allocated, "{during:?}");
    drop(tensor);
    let after = stats();
    assert_eq!(after.allocated, before.allocated);
    assert!(
        after.peak_allocated >= during.allocated && after.peak_reserved >= during.reserved,
        "{after:?}"
    );
    reset_peak_memory_stats(device).expect("reset");
    assert!(stats().peak_allocated < during.allocated);
    synchronize(device).expect("synchronize");
    empty_cache().expect("empty_cache");
    assert!(stats().reserved <= after.reserved - bytes as u64, "{after:?} {:?}", stats());
}
