// Whether a GPU runs kernels that are written for Hopper alone (sm_90a).
#pragma once

#include <atomic>
#include <initializer_list>

#include "tensor_map.h"

namespace tch_extension::hopper {

// For each device, what is known about a set of kernels that are launched in the same way.
class Processors {
 public:
  // The number of multiprocessors of the current device, if it has compute capability 9.0 and would
  // run the real code of each kernel; 0 otherwise. Compiled for any other architecture these
  // kernels are empty and have no static shared memory, which is how the two are told apart. Each
  // device is queried once.
  int of_current(std::initializer_list<const void*> kernels, int dynamic_bytes,
                 size_t static_bytes) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return 0;
    int found = known[device].load(std::memory_order_relaxed);
    if (found == kUnknown) {
      found = ask(device, kernels, dynamic_bytes, static_bytes);
      if (found == 0) {
        // Clear this query's error before the next launch check.
        (void)cudaGetLastError();
        found = kNone;
      }
      known[device].store(found, std::memory_order_relaxed);
    }
    return found == kNone ? 0 : found;
  }

 private:
  static int ask(int device, std::initializer_list<const void*> kernels, int dynamic_bytes,
                 size_t static_bytes) {
    int major = 0;
    int minor = 0;
    int processors = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) !=
            cudaSuccess ||
        major != 9 || minor != 0 || !can_make_maps()) {
      return 0;
    }
    for (const void* kernel : kernels) {
      cudaFuncAttributes code = {};
      if (cudaFuncGetAttributes(&code, kernel) != cudaSuccess ||
          code.sharedSizeBytes < static_bytes ||
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               dynamic_bytes) != cudaSuccess) {
        return 0;
      }
    }
    return processors;
  }

  static constexpr int kDevices = 64;
  static constexpr int kUnknown = 0;
  static constexpr int kNone = -1;
  std::atomic<int> known[kDevices] = {};
};

}  // namespace tch_extension::hopper
