// What plans need to know about a GPU: how many clusters, and how many blocks of a grid, it runs at
// the same time. The answers are those for the largest kernels of these ways, which need a whole
// multiprocessor for each block.
#include "cluster/launch.h"
#include "grid/launch.h"
#include "params.h"

namespace tch_extension::recurrent {
namespace {

// So large that a multiprocessor has room for one block, as for the largest kernels, and empty
// unless it is compiled for Hopper's own architecture.
constexpr int kLargestBlock = 512;
constexpr int kLargestMemory = 192 * 1024;

__global__ void __launch_bounds__(kLargestBlock, 1) probe_kernel() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  __shared__ volatile int value;
  if (threadIdx.x == 0) value = 0;
  __syncthreads();
  if (value != 0) __trap();
#endif
}

// Whether this code was compiled for Hopper's own architecture: otherwise all its kernels are
// empty.
cudaError_t is_compiled(bool* result) {
  cudaFuncAttributes code = {};
  const cudaError_t error = cudaFuncGetAttributes(&code, probe_kernel);
  *result = error == cudaSuccess && code.sharedSizeBytes > 0;
  return error;
}

// 0 if CUDA reports an error instead, as it may for clusters of 16.
int clusters_at_a_time(int blocks) {
  int clusters = 0;
  const cluster::Launch launch(kLargestBlock, kLargestMemory, blocks, 1, nullptr);
  if (allow<probe_kernel>() == cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, probe_kernel, &launch.config) == cudaSuccess)
    return clusters;
  // Clear this query's error before the next launch check.
  (void)cudaGetLastError();
  return 0;
}

}  // namespace
}  // namespace tch_extension::recurrent

using namespace tch_extension::recurrent;

// Writes how many clusters of 8 blocks, and of 16, `device` runs at a time; zeros if it cannot run
// the kernels. `device` has to be the current device.
extern "C" const char* tch_extension_recurrent_cluster_device_cuda(int32_t device,
                                                                   int64_t* clusters) {
  int major = 0;
  bool is_there = false;
  clusters[0] = clusters[1] = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = is_compiled(&is_there);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Other GPUs have not been measured, and have less shared memory.
  if (major != 9 || !is_there) return nullptr;
  clusters[0] = clusters_at_a_time(8);
  clusters[1] = clusters_at_a_time(16);
  return nullptr;
}

// Writes how many blocks `device` runs at the same time; 0 if it cannot run the kernels. `device`
// has to be the current device.
extern "C" const char* tch_extension_recurrent_grid_device_cuda(int32_t device, int64_t* blocks) {
  int major = 0, cooperative = 0, processors = 0;
  bool is_there = false;
  *blocks = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = is_compiled(&is_there);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Other GPUs have not been measured.
  if (major == 9 && cooperative != 0 && is_there) *blocks = processors;
  return nullptr;
}
