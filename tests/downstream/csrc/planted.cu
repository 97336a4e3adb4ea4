// Kernels that are wrong on purpose. A sanitizer's clean result for the operators means something
// only if it finds these faults.

#include "tch_extension/launch.h"

namespace tch_extension {
namespace {

// Writes one element past the end of `data`.
__global__ void planted_overrun_kernel(float* data, int64_t len) {
  for (int64_t i = threadIdx.x; i <= len; i += blockDim.x) data[i] = 1.0f;
}

// Each thread reads what another thread writes, without a barrier in between.
__global__ void planted_race_kernel(float* data) {
  __shared__ float shared[kThreads];
  shared[threadIdx.x] = data[threadIdx.x];
  data[threadIdx.x] = shared[(threadIdx.x + 33) % kThreads];
}

__global__ void planted_launch_kernel(float* data) { data[threadIdx.x] = 0.0f; }

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus downstream_planted_overrun(float* data, int64_t len,
                                                                  cudaStream_t stream) {
  tch_extension::planted_overrun_kernel<<<1, tch_extension::kThreads, 0, stream>>>(data, len);
  return tch_extension::launch_status("planted_overrun");
}

// `data` must have 256 values.
extern "C" tch_extension::LaunchStatus downstream_planted_race(float* data, cudaStream_t stream) {
  tch_extension::planted_race_kernel<<<1, tch_extension::kThreads, 0, stream>>>(data);
  return tch_extension::launch_status("planted_race");
}

// Launches more threads than a block can have.
extern "C" tch_extension::LaunchStatus downstream_planted_launch(float* data, cudaStream_t stream) {
  tch_extension::planted_launch_kernel<<<1, 2048, 0, stream>>>(data);
  return tch_extension::launch_status("planted_launch");
}
