//! The properties of a device.

use super::*;

#[test]
fn cuda_device_properties_are_those_that_cuda_has() {
    let test = "cuda_device_properties_are_those_that_cuda_has";
    if cuda_or_skip(test).is_none() {
        return;
    }
    for index in 0..device_count() {
        let found = device_properties(Device::Cuda(index)).expect("properties");
        assert!(!found.name.is_empty() && !found.name.contains('\0'), "{found:?}");
        // cudaDevAttrMultiProcessorCount and the two of the compute capability.
        assert_eq!(i64::from(found.multi_processor_count), attribute(16, index), "{found:?}");
        assert_eq!(i64::from(found.major), attribute(75, index), "{found:?}");
        assert_eq!(i64::from(found.minor), attribute(76, index), "{found:?}");
        // cudaDevAttrL2CacheSize and cudaDevAttrMaxSharedMemoryPerMultiprocessor.
        assert_eq!(found.l2_cache_size.try_into(), Ok(attribute(38, index)), "{found:?}");
        let shared = found.shared_memory_per_multiprocessor;
        assert_eq!(shared.try_into(), Ok(attribute(81, index)), "{found:?}");
        // cudaDevAttrClockRate, cudaDevAttrMemoryClockRate and cudaDevAttrGlobalMemoryBusWidth.
        assert_eq!(i64::from(found.clock_rate), attribute(13, index), "{found:?}");
        assert_eq!(i64::from(found.memory_clock_rate), attribute(36, index), "{found:?}");
        assert_eq!(i64::from(found.memory_bus_width), attribute(37, index), "{found:?}");
        // No GPU with tensor cores has less.
        assert!(found.total_memory > 1 << 30, "{found:?}");
    }
}

/// An attribute, as CUDA itself tells it.
fn attribute(number: i32, device: usize) -> i64 {
    type Get = unsafe extern "C" fn(*mut i32, i32, i32) -> i32;
    let mut value = -1;
    // SAFETY: this is the function's type, and it writes one integer.
    let error =
        unsafe { of_cuda::<Get>("cudaDeviceGetAttribute")(&mut value, number, device as i32) };
    assert_eq!(error, 0, "attribute {number}");
    i64::from(value)
}
