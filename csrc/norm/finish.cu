// The functions that src/ops/norm/kernels.rs calls, and the kernel that finishes a backward
// pass.

#include "../hopper/dependent_launch.h"
#include "kernels.h"
#include "row_team.h"

namespace tch_extension::norm {
namespace {

constexpr int kGroups = 16;

// This kernel may start while the previous one still runs, so that it must wait for its results.
// Every thread waits, even those without work, so that this kernel does not end before the previous
// one.
__device__ __forceinline__ void wait_for_the_kernel_before() { hopper::wait_for_previous_kernel(); }

// Adds up the sums as a tree: shorter chains of additions lose less precision.
template <typename C>
__device__ __forceinline__ C tree_sum(C (&total)[kGroups]) {
#pragma unroll
  for (int half = kGroups / 2; half > 0; half /= 2) {
#pragma unroll
    for (int group = 0; group < half; ++group) total[group] += total[group + half];
  }
  return total[0];
}

// Adds up the parts, with 32 columns per block and 16 threads per column. blockIdx.y is 0 for the
// weight and 1 for the bias.
template <typename T>
__global__ void __launch_bounds__(kWarp* kGroups) finish_kernel(NormBackward params) {
  using C = Compute<T>;
  wait_for_the_kernel_before();
  const void* parts = blockIdx.y == 0 ? params.weight_parts : params.bias_parts;
  void* result = blockIdx.y == 0 ? params.grad_weight : params.grad_bias;
  // The condition is the same for the whole block, so that no thread is missing at a barrier.
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
      C total[kGroups];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) total[group] = sums[group][threadIdx.x];
      static_cast<T*>(result)[column] = static_cast<T>(tree_sum(total));
    }
    __syncthreads();
  }
}

}  // namespace

bool start_finish(const NormBackward& params, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(at_most((params.columns + kWarp - 1) / kWarp, INT32_MAX), 2);
  config.blockDim = dim3(kWarp, kGroups);
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  // Only if the previous kernel allows it. This saves the gap between the two kernels.
  if (params.plan.early_finish) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    cudaLaunchKernelEx(&config, finish_kernel<T>, params);
  });
  return true;
}

}  // namespace tch_extension::norm

// Describes the current device, whose index must be `device`.
extern "C" const char* tch_extension_norm_device_cuda(int32_t device, NormGpu* result) {
  cudaError_t error =
      cudaDeviceGetAttribute(&result->processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&result->shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                   device);
  }
  // Where a kernel can wait for the previous one, there are clusters and their barrier, too.
  static tch_extension::hopper::DependentLaunches launches;
  const auto waits = reinterpret_cast<const void*>(tch_extension::norm::finish_kernel<float>);
  result->clusters = launches.are_possible(waits) ? 1 : 0;
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
