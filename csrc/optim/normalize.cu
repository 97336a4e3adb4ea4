// scale · from / norms for the matrices of Muon's iteration, from bf16 to fp16. libtorch's division
// of a batch by a number each is not vectorised, and takes five times as long.
#include <algorithm>

#include "params.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::optim {
namespace {

constexpr int kLanes = 8;  // 16 bytes

// A row of blocks takes a matrix after another. Vectors of kWidth values.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) normalize_kernel(const OptimNormalize params) {
  for (int64_t matrix = blockIdx.y; matrix < params.batch; matrix += gridDim.y) {
    const auto* from = static_cast<const __nv_bfloat16*>(params.from) + matrix * params.len;
    auto* to = static_cast<__half*>(params.to) + matrix * params.len;
    const float norm = __bfloat162float(static_cast<const __nv_bfloat16*>(params.norms)[matrix]);
    const int64_t by = int64_t{gridDim.x} * kThreads * kWidth;
    for (int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth; at < params.len;
         at += by) {
      auto values = load_values<__nv_bfloat16, kWidth>(from, at);
      Values<__half, kWidth> results;
#pragma unroll
      for (int lane = 0; lane < kWidth; ++lane)
        results.lane[lane] = params.scale * (values.lane[lane] / norm);
      store_values<__half, kWidth>(to, at, results);
    }
  }
}

}  // namespace
}  // namespace tch_extension::optim

extern "C" tch_extension::LaunchStatus tch_extension_optim_normalize_cuda(
    const OptimNormalize* params, cudaStream_t stream) {
  using namespace tch_extension;
  using namespace tch_extension::optim;
  constexpr const char* kName = "optim_normalize";
  if (params->batch == 0 || params->len == 0) return {kName, nullptr};
  const bool is_in_vectors =
      is_aligned_to_16(params->from) && is_aligned_to_16(params->to) && params->len % kLanes == 0;
  const int64_t in_block = int64_t{kThreads} * (is_in_vectors ? kLanes : 1);
  constexpr int64_t kMostBlocks = 65535;
  const dim3 grid(static_cast<unsigned int>(std::min(ceil_div(params->len, in_block), kMostBlocks)),
                  static_cast<unsigned int>(std::min(params->batch, kMostBlocks)));
  if (is_in_vectors) {
    normalize_kernel<kLanes><<<grid, kThreads, 0, stream>>>(*params);
  } else {
    normalize_kernel<1><<<grid, kThreads, 0, stream>>>(*params);
  }
  return launch_status(kName);
}
