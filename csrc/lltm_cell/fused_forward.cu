// The forward in one kernel. A warp computes the three gates of a tile of rows and hidden columns.
// Its lanes split K = H + F, so that rows of [h, x] and of W are read in their own layout. The
// lanes' sums are then reduced so that the three gates of one element end up in one lane, which
// computes the rest of the cell.

#include <cstddef>

#include "lltm_cell.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {
namespace {

// The tile of a warp, and the number of warps of a block, which have the same columns and different
// rows.
template <int kRows_, int kColumns_, int kWarps_, int kUnroll_>
struct Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kWarps = kWarps_, kUnroll = kUnroll_;
  static constexpr int kElements = kRows * kColumns;  // a power of two, at most 32
};

// Reduces the lanes' sums. Afterwards lane l has the sums of element l / (32 / kElements): in each
// step half of the elements go to the lanes whose bit is set, so that 32 sums cost 31 shuffles
// instead of 160.
template <int kElements, int kOffset, typename C>
__device__ __forceinline__ void add_up_lanes(C (*sum)[3], int lane) {
  if constexpr (kOffset > 0) {
    constexpr int kKept = kElements > 1 ? kElements / 2 : 1;
    const bool upper = lane & kOffset;
#pragma unroll
    for (int element = 0; element < kKept; ++element) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        const C low = sum[element][gate], high = sum[element + kElements - kKept][gate];
        const C sent = __shfl_xor_sync(kAllLanes, upper ? low : high, kOffset);
        sum[element][gate] = (upper ? high : low) + sent;
      }
    }
    add_up_lanes<kKept, kOffset / 2>(sum, lane);
  }
}

template <typename T, int kLanes, typename Tile>
__global__ void __launch_bounds__(kWarp* Tile::kWarps)
    lltm_cell_fused_forward(LltmCellFusedForward params) {
  using C = Compute<T>;
  using std::tanh;
  constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kUnroll = Tile::kUnroll;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t hidden = params.hidden, depth = hidden + params.features;
  const int64_t tiles = ceil_div(hidden, kColumns);
  const int64_t first_row = (blockIdx.x / tiles * Tile::kWarps + warp) * kRows;
  const int64_t first_column = blockIdx.x % tiles * kColumns;
  if (first_row >= params.batch) return;

  // What the lane needs at the end for its own element is loaded first.
  constexpr int kLanesOfElement = kWarp / Tile::kElements;
  const int element = lane / kLanesOfElement;
  const int64_t row = first_row + element / kColumns, column = first_column + element % kColumns;
  const bool exists = row < params.batch && column < hidden;
  C bias[3] = {}, c = 0;
  if (exists) {
    c = static_cast<C>(static_cast<const T*>(params.c)[row * params.c_stride + column]);
    if (params.bias != nullptr) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        bias[gate] = static_cast<C>(static_cast<const T*>(params.bias)[gate * hidden + column]);
      }
    }
    if (params.input_gates != nullptr) {
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        bias[gate] += static_cast<const C*>(params.input_gates)[(row * 3 + gate) * hidden + column];
      }
    }
  }

  // Beyond the last row or column the last one is read again, and its sums are not used.
  const T* from_h[kRows];
  const T* from_x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t at = min(first_row + r, params.batch - 1);
    from_h[r] = static_cast<const T*>(params.h) + at * params.h_stride;
    from_x[r] = static_cast<const T*>(params.input) + at * params.input_stride;
  }
  const T* from_w[kColumns][3];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
      from_w[j][gate] = static_cast<const T*>(params.weight) +
                        (gate * hidden + min(first_column + j, hidden - 1)) * params.weight_stride;
    }
  }

  C sum[Tile::kElements][3] = {};
  constexpr int kStep = kWarp * kLanes;
  for (int64_t start = lane * kLanes; start < depth; start += kStep * kUnroll) {
    Vector<T, kLanes> left[kUnroll][kRows] = {}, right[kUnroll][kColumns][3] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t k = start + u * kStep;
      if (k >= depth) continue;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        left[u][r] = k < hidden ? load_vector<T, kLanes>(from_h[r], k)
                                : load_vector<T, kLanes>(from_x[r], k - hidden);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
          right[u][j][gate] = load_vector<T, kLanes>(from_w[j][gate], k);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Values<T, kLanes> x[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) x[r] = values_of(left[u][r]);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
          const auto w = values_of(right[u][j][gate]);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int l = 0; l < kLanes; ++l)
              sum[r * kColumns + j][gate] += x[r].lane[l] * w.lane[l];
          }
        }
      }
    }
  }
  add_up_lanes<Tile::kElements, kWarp / 2>(sum, lane);
  if (!exists || lane % kLanesOfElement != 0) return;

  const C i = sigmoid(sum[0][0] + bias[0]), o = sigmoid(sum[0][1] + bias[1]),
          g = sum[0][2] + bias[2];
  c += elu(g) * i;
  const int64_t at = row * hidden + column;
  static_cast<T*>(params.new_c)[at] = static_cast<T>(c);
  const T h = static_cast<T>(tanh(c) * o);
  static_cast<T*>(params.new_h)[at] = h;
  if (params.output != nullptr) static_cast<T*>(params.output)[at] = h;
  if (params.activations == nullptr) return;
  T* const activations = static_cast<T*>(params.activations) + row * 3 * hidden + column;
  activations[0] = static_cast<T>(i);
  activations[hidden] = static_cast<T>(o);
  activations[2 * hidden] = static_cast<T>(g);
}

template <typename Tile>
int64_t blocks_of(const LltmCellFusedForward& params) {
  return ceil_div(params.hidden, Tile::kColumns) *
         ceil_div(params.batch, Tile::kRows * Tile::kWarps);
}

template <typename T, int kLanes, typename Tile>
void start(const LltmCellFusedForward& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned int>(blocks_of<Tile>(params));
  lltm_cell_fused_forward<T, kLanes, Tile><<<blocks, kWarp * Tile::kWarps, 0, stream>>>(params);
}

// The small tile, with much of K in flight at once, is used where all its blocks run at the same
// time and latency matters. Beyond that, the large tile reads less for each product. On an H200,
// which has 132 multiprocessors, three blocks with the small tile fit a multiprocessor. Both tiles
// add their sums in the same order.
using SmallTile = Tile<4, 2, 4, 2>;
using LargeTile = Tile<4, 4, 4, 1>;
constexpr int64_t kBlocksAtOnce = 3 * 132;

// A single row reads each weight once, so only the number of loads in flight matters.
using RowTile = Tile<1, 1, 1, 4>;

template <typename T, int kLanes>
void start_with_tile(const LltmCellFusedForward& params, cudaStream_t stream) {
  if (params.batch == 1) {
    start<T, kLanes, RowTile>(params, stream);
  } else if (blocks_of<SmallTile>(params) <= kBlocksAtOnce) {
    start<T, kLanes, SmallTile>(params, stream);
  } else {
    start<T, kLanes, LargeTile>(params, stream);
  }
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_lltm_cell_fused_forward_cuda(
    const LltmCellFusedForward* params, cudaStream_t stream) {
  using namespace tch_extension;
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    params->vectors ? start_with_tile<T, kLanesOf16Bytes<T>>(*params, stream)
                    : start_with_tile<T, 1>(*params, stream);
  });
  return launch_status("lltm_cell_fused_forward");
}
