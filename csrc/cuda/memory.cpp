// The memory that libtorch's CUDA allocator holds.
#ifdef TCH_EXTENSION_CUDA

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;
namespace allocator = c10::cuda::CUDACachingAllocator;

struct tch_extension::MemoryStats {
  int64_t allocated;
  int64_t peak_allocated;
  int64_t reserved;
  int64_t peak_reserved;
  int64_t retries;
  int64_t out_of_memory;
};

TCH_EXTENSION_API Message tch_extension_cuda_memory_stats(int32_t device, MemoryStats* result) {
  return guard([&] {
    // The allocator knows no device until libtorch has initialised CUDA.
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    const auto& allocated = stats.allocated_bytes[all];
    const auto& reserved = stats.reserved_bytes[all];
    *result = {allocated.current, allocated.peak,          reserved.current,
               reserved.peak,     stats.num_alloc_retries, stats.num_ooms};
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_reset_peak_memory_stats(int32_t device) {
  return guard([&] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    allocator::resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_empty_cache() {
  return guard([&] {
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
    allocator::emptyCache();
  });
}

#endif  // TCH_EXTENSION_CUDA
