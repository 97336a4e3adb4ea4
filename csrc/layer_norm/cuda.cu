// The entries from src/ffi/layer_norm.rs, and the kernel that ends a backward.

#include <atomic>

#include "backward.h"

namespace tch_extension {
namespace {

// Adds up the parts: 32 columns a block, 16 threads a column. blockIdx.y is 0 for the weight, 1 for the bias.
constexpr int kGroups = 16;

template <typename T>
__global__ void __launch_bounds__(kWarp* kGroups) layer_norm_finish(LayerNormBackward params) {
  using C = Compute<T>;
#if __CUDA_ARCH__ >= 900
  // Started while the kernel before may still run: all of that must be there first. Every thread waits, also
  // those without work, so that this kernel never ends before the other.
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const void* parts = blockIdx.y == 0 ? params.weight_parts : params.bias_parts;
  void* result = blockIdx.y == 0 ? params.grad_weight : params.grad_bias;
  // The whole block returns.
  if (result == nullptr) return;
  __shared__ C sums[kGroups][kWarp];
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kWarp; first < params.columns;
       first += static_cast<int64_t>(gridDim.x) * kWarp) {
    const int64_t column = first + threadIdx.x;
    C sum(0);
    if (column < params.columns) {
#pragma unroll 8
      for (int64_t part = threadIdx.y; part < params.parts; part += kGroups) {
        sum += static_cast<const C*>(parts)[part * params.columns + column];
      }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < params.columns) {
      // As a tree: the shorter the sums, the less is lost.
      C total[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) total[group] = sums[group][threadIdx.x];
#pragma unroll
      for (int half = kGroups / 2; half > 0; half /= 2) {
#pragma unroll
        for (int group = 0; group < half; ++group) total[group] += total[group + half];
      }
      static_cast<T*>(result)[column] = static_cast<T>(total[0]);
    }
    __syncthreads();
  }
}

LaunchStatus finish(const char* kernel, const LayerNormBackward& params, cudaStream_t stream) {
  if (params.columns == 0) return {kernel, nullptr};
  if (params.kind != params.parameter_kind) return {kernel, "internal error: mixed kinds"};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(at_most((params.columns + kWarp - 1) / kWarp, INT32_MAX), 2);
  config.blockDim = dim3(kWarp, kGroups);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  // Only where the kernel before lets it, which saves the time between the two.
  if (params.plan.early_finish) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    cudaLaunchKernelEx(&config, layer_norm_finish<T>, params);
  });
  return launch_status(kernel);
}

LaunchStatus status(const char* kernel, const char* mistake) {
  if (mistake != nullptr) return {kernel, mistake};
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_layer_norm_forward_cuda(const LayerNormForward* params,
                                                                             cudaStream_t stream) {
  constexpr const char* kKernel = "layer_norm_forward";
  if (params->columns == 0) return {kKernel, nullptr};
  return tch_extension::status(kKernel, tch_extension::start_layer_norm_forward(*params, stream));
}

extern "C" tch_extension::LaunchStatus tch_extension_layer_norm_backward_cuda(const LayerNormBackward* params,
                                                                              cudaStream_t stream) {
  constexpr const char* kKernel = "layer_norm_backward";
  if (params->columns == 0) return {kKernel, nullptr};
  const auto start = params->plan.stages > 0 ? tch_extension::start_layer_norm_backward_ring
                                             : tch_extension::start_layer_norm_backward;
  return tch_extension::status(kKernel, start(*params, stream));
}

extern "C" tch_extension::LaunchStatus tch_extension_layer_norm_finish_cuda(const LayerNormBackward* params,
                                                                            cudaStream_t stream) {
  return tch_extension::finish("layer_norm_finish", *params, stream);
}

extern "C" const char* tch_extension_layer_norm_device(int32_t device, LayerNormDevice* result) {
  int major = 0;
  cudaError_t error = cudaDeviceGetAttribute(&result->processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&result->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  }
  result->clusters = major >= 9 ? 1 : 0;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
