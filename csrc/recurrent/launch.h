// What the launches of the kernels that keep W_h on the chip share: limits that have to be set once
// for each kernel, and the choice of the types that a kernel is compiled for.
#pragma once

#include <atomic>

#include "tch_extension/launch.h"

namespace tch_extension::recurrent {
namespace {

// The answers of queries are cached for this many devices.
constexpr int kDevices = 64;

// Lets the kernel use all the shared memory that a block can have, and clusters of more than the 8
// blocks that every GPU supports. These limits belong to the kernel, not to the launch: a limit
// that is set for a small launch would make a large launch fail that another thread is about to
// start. Therefore they are set to the maximum, once for each kernel and device.
template <auto kKernel>
cudaError_t allow() {
  static std::atomic<bool> is_allowed[kDevices];
  int device = 0;
  int most = 0;
  cudaFuncAttributes code = {};
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device < kDevices && is_allowed[device].load(std::memory_order_acquire)) return cudaSuccess;
  const auto function = reinterpret_cast<const void*>(kKernel);
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, function);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(code.sharedSizeBytes));
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess && device < kDevices)
    is_allowed[device].store(true, std::memory_order_release);
  return error;
}

// Calls body.run<S, T>() for each supported pair of kinds of state and product.
template <typename Cell, typename Body>
const char* for_kinds(int32_t state, int32_t product, const Body& body) {
  const char* error = "internal error: no cluster or grid kernel for these kinds";
  const bool both = state == product;
  if (!both && state != kTchExtensionFloat) return error;
  for_kind(product, [&](auto type) {
    using T = typename decltype(type)::type;
    if (both) {
      error = body.template run<T, T>();
    } else if constexpr (sizeof(T) == 2 && Cell::kHasMixedKinds) {
      error = body.template run<float, T>();
    }
  });
  return error;
}

constexpr const char* kNoKernel = "internal error: no cluster or grid kernel for this plan";

}  // namespace
}  // namespace tch_extension::recurrent
