// Starting a persistent kernel, and which of them is made for a size.
#pragma once

#include <atomic>

#include "persistent_device.h"

namespace tch_extension {
namespace {

// H' for a hidden size and a number of blocks: what a kernel is compiled for. 0 if there is none.
inline int padded_size(int64_t hidden, int32_t cluster) {
  if (cluster != 8 && cluster != 16) return 0;
  if (hidden <= 128) return cluster == 8 ? 128 : 0;
  if (hidden <= 256) return 256;
  if (hidden <= 512) return 512;
  return cluster == 16 && hidden <= 768 ? 768 : 0;
}

struct ClusterLaunch {
  ClusterLaunch(int threads, int bytes, int32_t cluster, int64_t clusters, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned int>(clusters * cluster));
    config.blockDim = dim3(static_cast<unsigned int>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned int>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
};

// For which what is asked once is kept.
constexpr int kDevices = 64;

// Lets the kernel have all the shared memory that a block can, and clusters of more than the 8
// blocks that every GPU has. The limits belong to the kernel, not to the launch: one set for a
// small launch would make the large one fail that another thread is about to start. Once for each
// kernel and device, therefore, and never less.
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

template <auto kKernel, typename Product, typename Params>
const char* start_clusters(const Params& params, int bytes, cudaStream_t stream) {
  cudaError_t error = allow<kKernel>();
  if (error == cudaSuccess) {
    const int64_t clusters = ceil_div(params.batch, kRows);
    const ClusterLaunch launch(Product::kThreads, bytes, Product::kCluster, clusters, stream);
    error = cudaLaunchKernelEx(&launch.config, kKernel, params);
  }
  // Also so that the next launch does not find the error of this one.
  const LaunchStatus status = launch_status("");
  return error == cudaSuccess ? status.error : cudaGetErrorString(error);
}

// Calls body.run<S, T>() for the kinds of state and product that there are.
template <typename Body>
const char* for_kinds(int32_t state, int32_t product, const Body& body) {
  const char* error = "internal error: no persistent kernel for these kinds";
  const bool both = state == product;
  if (!both && state != kTchExtensionFloat) return error;
  for_kind(product, [&](auto type) {
    using T = typename decltype(type)::type;
    if (both) {
      error = body.template run<T, T>();
    } else if constexpr (sizeof(T) == 2) {
      error = body.template run<float, T>();
    }
  });
  return error;
}

constexpr const char* kNoKernel = "internal error: no persistent kernel for this plan";

}  // namespace
}  // namespace tch_extension
