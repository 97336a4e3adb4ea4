// Scales rows of float to fp16, as scale_rows.h describes.

#include "scale_rows.h"
#include "tch_extension/cuda_reduce.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {
namespace {

constexpr int kRowsOfBlock = kThreads / kWarp;

// The largest finite magnitude of a row, among the values of all lanes.
__device__ float largest_of(const float* row, int64_t columns) {
  float largest = 0;
  for (int64_t at = threadIdx.x % kWarp; at < columns; at += kWarp) {
    const float magnitude = fabsf(row[at]);
    if (isfinite(magnitude)) largest = fmaxf(largest, magnitude);
  }
  return warp_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
}

// The exponent of the power of two that takes a nonzero magnitude to [2^14, 2^15).
__device__ int exponent_for(float largest) {
  constexpr int kTop = 14;
  return min(max(kTop - ilogbf(largest), -kMostExponent), kMostExponent);
}

// One warp for each row.
__global__ void __launch_bounds__(kThreads)
    scale_rows_kernel(const __grid_constant__ ScaleRows params) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarp;
  const bool is_second = index >= params.matrices[0].rows;
  const ScaledRows& matrix = params.matrices[is_second];
  const int64_t row = is_second ? index - params.matrices[0].rows : index;
  if (row >= matrix.rows) return;
  const float* from = matrix.from + row * matrix.stride;
  __half* to = static_cast<__half*>(matrix.to) + row * matrix.to_stride;
  const float largest = largest_of(from, params.columns);
  const int exponent =
      largest == 0 ? static_cast<int>(matrix.exponent_of_zeros) : exponent_for(largest);
  const float scale = ldexpf(1.0f, exponent);
  for (int64_t at = threadIdx.x % kWarp; at < matrix.to_stride; at += kWarp) {
    to[at] = __float2half_rn(at < params.columns ? from[at] * scale : 0.0f);
  }
  if (threadIdx.x % kWarp == 0) matrix.scales[row] = ldexpf(1.0f, -exponent);
}

}  // namespace
}  // namespace tch_extension::recurrent

extern "C" tch_extension::LaunchStatus tch_extension_recurrent_scale_rows_cuda(
    const tch_extension::recurrent::ScaleRows* params, cudaStream_t stream) {
  using namespace tch_extension;
  using namespace recurrent;
  const int64_t rows = params->matrices[0].rows + params->matrices[1].rows;
  scale_rows_kernel<<<static_cast<unsigned int>(ceil_div(rows, kRowsOfBlock)), kThreads, 0,
                      stream>>>(*params);
  return launch_status("recurrent_scale_rows");
}
