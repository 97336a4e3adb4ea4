// What a CUDA device is.
#ifdef TCH_EXTENSION_CUDA

#include <ATen/cuda/CUDAContext.h>

#include <cstring>

#include "../ffi.h"
#include "attribute.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// src/ffi/cuda.rs mirrors it.
struct tch_extension::DeviceFacts {
  char name[256];
  int32_t major;
  int32_t minor;
  uint32_t multi_processor_count;
  uint64_t total_memory;
  uint64_t l2_cache_size;
  uint64_t shared_memory_per_multiprocessor;
  uint32_t clock_rate;
  uint32_t memory_clock_rate;
  uint32_t memory_bus_width;
};

TCH_EXTENSION_API Message tch_extension_cuda_device_properties(int32_t device,
                                                               DeviceFacts* result) {
  return guard([&] {
    // libtorch asks CUDA once for each device.
    const auto& found = *at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(device));
    *result = {{},
               found.major,
               found.minor,
               static_cast<uint32_t>(found.multiProcessorCount),
               found.totalGlobalMem,
               static_cast<uint64_t>(found.l2CacheSize),
               found.sharedMemPerMultiprocessor,
               known_attribute(cudaDevAttrClockRate, device),
               known_attribute(cudaDevAttrMemoryClockRate, device),
               known_attribute(cudaDevAttrGlobalMemoryBusWidth, device)};
    static_assert(sizeof found.name == sizeof result->name);
    std::memcpy(result->name, found.name, sizeof result->name);  // ends with a zero
  });
}

TCH_EXTENSION_API Message tch_extension_cuda_version(int32_t* result) {
  return guard([&] { check(cudaRuntimeGetVersion(result)); });
}

#endif  // TCH_EXTENSION_CUDA
