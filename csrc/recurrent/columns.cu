// Writes the transposed operand that RecurrentColumns in params.h describes.

#include "params.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kTileRows = 64;
constexpr int kTileColumns = kWarp;

__device__ __forceinline__ float value_of(const RecurrentColumns& params, int64_t row,
                                          int64_t column) {
  if (column >= params.hidden) return params.input[row * params.features + column - params.hidden];
  if (row < params.batch) return params.h0[row * params.hidden + column];
  return params.output[(row - params.batch) * params.hidden + column];
}

// Each block transposes a tile through shared memory: lanes read adjacent values of a row and write
// adjacent values of a column.
__global__ void __launch_bounds__(kThreads)
    columns_kernel(const __grid_constant__ RecurrentColumns params) {
  __shared__ float tile[kTileRows][kTileColumns + 1];
  const int64_t columns = params.hidden + params.features;
  const int64_t tiles = (columns + kTileColumns - 1) / kTileColumns;
  const int64_t first_row = blockIdx.x / tiles * kTileRows,
                first_column = blockIdx.x % tiles * kTileColumns;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int of_tile = warp; of_tile < kTileRows; of_tile += kWarps) {
    const int64_t row = first_row + of_tile, column = first_column + lane;
    tile[of_tile][lane] =
        row < params.rows && column < columns ? value_of(params, row, column) : 0.0f;
  }
  __syncthreads();
#pragma unroll
  for (int of_tile = warp; of_tile < kTileColumns; of_tile += kWarps) {
    float* to = params.to + (first_column + of_tile) * params.to_stride + first_row;
#pragma unroll
    for (int row = lane; row < kTileRows; row += kWarp) {
      const bool is_there = first_column + of_tile < columns && first_row + row < params.to_stride;
      if (is_there) to[row] = tile[row][of_tile];
    }
  }
}

}  // namespace
}  // namespace tch_extension::recurrent

extern "C" tch_extension::LaunchStatus tch_extension_recurrent_columns_cuda(
    const RecurrentColumns* params, cudaStream_t stream) {
  using namespace tch_extension;
  using namespace recurrent;
  const int64_t tiles = ceil_div(params->hidden + params->features, kTileColumns);
  const int64_t blocks = ceil_div(params->to_stride, kTileRows) * tiles;
  if (blocks > INT32_MAX)
    return {"recurrent_columns", "internal error: more tiles than a grid has blocks"};
  if (blocks > 0)
    columns_kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(*params);
  return launch_status("recurrent_columns");
}
