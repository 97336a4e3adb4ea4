// The LLTM cell in one kernel for each direction, where launches cost more than arithmetic does. Nothing is
// concatenated, no product is written to memory, and no block waits for another.
//
// Forward: a warp computes the three gates of a tile of rows and hidden columns, its lanes along K = H + F,
// so that rows of [h, x] and of W are read as they lie. The lanes' sums are then added up in such a way that
// the three gates of one element end in one lane, which does the rest of the cell.
//
// Backward: some blocks compute tiles of dG W, the others tiles of dGᵀ [h, x]. Each computes what it needs of
// dG by itself: that is cheaper than to wait for a kernel that would write it.

#include <cstddef>

#include "lltm_cell.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {
namespace {

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- forward ----------------------------------------------------------------------------------------------

// A warp's tile and a block's warps, which have the same columns and different rows.
template <int kRows_, int kColumns_, int kWarps_, int kUnroll_>
struct Tile {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kWarps = kWarps_, kUnroll = kUnroll_;
  static constexpr int kElements = kRows * kColumns;  // a power of two, at most 32
};

// Adds up the lanes' sums. Afterwards lane l has those of element l / (32 / kElements): with each step half
// of the elements go to the lanes whose bit is set, so that 32 sums cost 31 exchanges and not 160.
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
__global__ void __launch_bounds__(kWarp* Tile::kWarps) lltm_cell_fused_forward(LltmCellFusedForward params) {
  using C = Compute<T>;
  using std::tanh;
  constexpr int kRows = Tile::kRows, kColumns = Tile::kColumns, kUnroll = Tile::kUnroll;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t hidden = params.hidden, depth = hidden + params.features;
  const int64_t tiles = ceil_div(hidden, kColumns);
  const int64_t first_row = (blockIdx.x / tiles * Tile::kWarps + warp) * kRows;
  const int64_t first_column = blockIdx.x % tiles * kColumns;
  if (first_row >= params.batch) return;

  // What the lane's own element needs at the end is asked for first.
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
        left[u][r] =
            k < hidden ? load_vector<T, kLanes>(from_h[r], k) : load_vector<T, kLanes>(from_x[r], k - hidden);
      }
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) right[u][j][gate] = load_vector<T, kLanes>(from_w[j][gate], k);
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
            for (int l = 0; l < kLanes; ++l) sum[r * kColumns + j][gate] += x[r].lane[l] * w.lane[l];
          }
        }
      }
    }
  }
  add_up_lanes<Tile::kElements, kWarp / 2>(sum, lane);
  if (!exists || lane % kLanesOfElement != 0) return;

  const C i = sigmoid(sum[0][0] + bias[0]), o = sigmoid(sum[0][1] + bias[1]), g = sum[0][2] + bias[2];
  c += elu(g) * i;
  const int64_t at = row * hidden + column;
  static_cast<T*>(params.new_c)[at] = static_cast<T>(c);
  static_cast<T*>(params.new_h)[at] = static_cast<T>(tanh(c) * o);
  if (params.activations == nullptr) return;
  T* const activations = static_cast<T*>(params.activations) + row * 3 * hidden + column;
  activations[0] = static_cast<T>(i);
  activations[hidden] = static_cast<T>(o);
  activations[2 * hidden] = static_cast<T>(g);
}

// --- backward ---------------------------------------------------------------------------------------------

constexpr int kBackwardWarps = 8;
constexpr int kBackwardThreads = kBackwardWarps * kWarp;

template <typename C>
struct GateGradients {
  C gate[3];
  C c;
};

template <typename T>
__device__ __forceinline__ Compute<T> value_or_zero(const void* pointer, int64_t at) {
  using C = Compute<T>;
  return pointer == nullptr ? C(0) : static_cast<C>(static_cast<const T*>(pointer)[at]);
}

// dG of one element, from what the forward saved.
template <typename T>
__device__ __forceinline__ GateGradients<Compute<T>> gate_gradients(const LltmCellFusedBackward& params,
                                                                    int64_t row, int64_t column) {
  using C = Compute<T>;
  using std::tanh;
  const int64_t at = row * params.hidden + column;
  const T* const activations = static_cast<const T*>(params.activations) + row * 3 * params.hidden + column;
  const C i = static_cast<C>(activations[0]), o = static_cast<C>(activations[params.hidden]),
          g = static_cast<C>(activations[2 * params.hidden]);
  const C grad_h = value_or_zero<T>(params.grad_new_h, at);
  const C tanh_c = tanh(static_cast<C>(static_cast<const T*>(params.new_c)[at]));
  const C grad_c = value_or_zero<T>(params.grad_new_c, at) + grad_h * o * tanh_grad(tanh_c);
  return {{grad_c * elu(g) * sigmoid_grad(i), grad_h * tanh_c * sigmoid_grad(o), grad_c * i * elu_grad(g)},
          grad_c};
}

// Rows of a tile of dG W; it has 32 columns. Hidden columns are taken in pieces; a warp has its part of each.
constexpr int kInputRows = 4;
constexpr int kPiece = 128;
constexpr int kPieceOfWarp = kPiece / kBackwardWarps;
// Hidden columns of a tile of dGᵀ [h, x]; it has 32 columns for each warp. Rows are taken in pieces.
constexpr int kWeightColumns = 4;
constexpr int kWeightRows = 3 * kWeightColumns;
constexpr int kRowsOfPiece = kBackwardThreads / kWeightColumns;

template <typename C>
union alignas(16) BackwardShared {
  C gates[3][kPiece][kInputRows];  // rows last: one load has all of them
  C partial[kBackwardWarps][kInputRows][kWarp];
  C gates_by_row[kRowsOfPiece][kWeightRows];
};

// The columns of [h, x] whose gradients are asked for.
struct InputColumns {
  int64_t begin, end;
};

__host__ __device__ InputColumns input_columns(const LltmCellFusedBackward& params) {
  return {params.grad_h != nullptr ? 0 : params.hidden,
          params.grad_input != nullptr ? params.hidden + params.features : params.hidden};
}

__host__ __device__ int64_t input_tiles(const LltmCellFusedBackward& params) {
  const InputColumns columns = input_columns(params);
  return ceil_div(columns.end - columns.begin, kWarp) * ceil_div(params.batch, kInputRows);
}

// Tiles of dGᵀ [h, x] along K. Without the weight's gradient one is left for the bias' and c's.
__host__ __device__ int64_t weight_tiles_along_k(const LltmCellFusedBackward& params) {
  if (params.grad_weight != nullptr) return ceil_div(params.hidden + params.features, kBackwardThreads);
  return params.grad_bias != nullptr || params.grad_c != nullptr ? 1 : 0;
}

template <typename T>
__device__ void input_tile(const LltmCellFusedBackward& params, int64_t tile,
                           BackwardShared<Compute<T>>& shared) {
  using C = Compute<T>;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t hidden = params.hidden;
  const InputColumns columns = input_columns(params);
  const int64_t tiles = ceil_div(columns.end - columns.begin, kWarp);
  const int64_t first_row = tile / tiles * kInputRows;
  const int64_t column = columns.begin + tile % tiles * kWarp + lane;
  const bool exists = column < columns.end;
  // Beyond the last column the last one is read again.
  const T* const weight = static_cast<const T*>(params.weight) + min(column, columns.end - 1);

  C sum[kInputRows] = {};
  for (int64_t piece = 0; piece < hidden; piece += kPiece) {
    // Asked for before dG is computed: these take longest.
    T w[3][kPieceOfWarp];
#pragma unroll
    for (int j = 0; j < kPieceOfWarp; ++j) {
      const int64_t at = min(piece + warp * kPieceOfWarp + j, hidden - 1);
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        w[gate][j] = weight[(gate * hidden + at) * params.weight_stride];
      }
    }
    for (int at = threadIdx.x; at < kInputRows * kPiece; at += kBackwardThreads) {
      const int r = at / kPiece, j = at % kPiece;
      GateGradients<C> gradients = {};
      if (first_row + r < params.batch && piece + j < hidden) {
        gradients = gate_gradients<T>(params, first_row + r, piece + j);
      }
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) shared.gates[gate][j][r] = gradients.gate[gate];
    }
    __syncthreads();
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
#pragma unroll
      for (int j = 0; j < kPieceOfWarp; ++j) {
        const C value = static_cast<C>(w[gate][j]);
#pragma unroll
        for (int r = 0; r < kInputRows; ++r) {
          sum[r] += shared.gates[gate][warp * kPieceOfWarp + j][r] * value;
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < kInputRows; ++r) shared.partial[warp][r][lane] = sum[r];
  __syncthreads();
  const int64_t row = first_row + warp;
  if (warp >= kInputRows || row >= params.batch || !exists) return;
  C total = 0;
#pragma unroll
  for (int part = 0; part < kBackwardWarps; ++part) total += shared.partial[part][warp][lane];
  if (column < hidden) {
    static_cast<T*>(params.grad_h)[row * hidden + column] = static_cast<T>(total);
  } else {
    static_cast<T*>(params.grad_input)[row * params.features + column - hidden] = static_cast<T>(total);
  }
}

template <typename T>
__device__ void weight_tile(const LltmCellFusedBackward& params, int64_t tile,
                            BackwardShared<Compute<T>>& shared) {
  using C = Compute<T>;
  const int64_t hidden = params.hidden, depth = hidden + params.features;
  const int64_t tiles = weight_tiles_along_k(params);
  const int64_t first = tile / tiles * kWeightColumns;
  const bool leads = tile % tiles == 0;
  const int64_t k = tile % tiles * kBackwardThreads + threadIdx.x;
  const bool has_column = params.grad_weight != nullptr && k < depth;
  const bool of_h = k < hidden;
  const T* const from =
      of_h ? static_cast<const T*>(params.h) + k : static_cast<const T*>(params.input) + (k - hidden);
  const int64_t stride = of_h ? params.h_stride : params.input_stride;

  C sum[kWeightRows] = {};
  C bias = 0;
  for (int64_t piece = 0; piece < params.batch; piece += kRowsOfPiece) {
    const int rows = static_cast<int>(min(static_cast<int64_t>(kRowsOfPiece), params.batch - piece));
    const int r = threadIdx.x / kWeightColumns, j = threadIdx.x % kWeightColumns;
    if (r < rows) {
      GateGradients<C> gradients = {};
      if (first + j < hidden) {
        gradients = gate_gradients<T>(params, piece + r, first + j);
        if (leads && params.grad_c != nullptr) {
          static_cast<T*>(params.grad_c)[(piece + r) * hidden + first + j] = static_cast<T>(gradients.c);
        }
      }
#pragma unroll
      for (int gate = 0; gate < 3; ++gate) {
        shared.gates_by_row[r][gate * kWeightColumns + j] = gradients.gate[gate];
      }
    }
    __syncthreads();
    if (has_column) {
#pragma unroll 8
      for (int at = 0; at < rows; ++at) {
        const C x = static_cast<C>(from[(piece + at) * stride]);
#pragma unroll
        for (int n = 0; n < kWeightRows; ++n) sum[n] += shared.gates_by_row[at][n] * x;
      }
    }
    if (leads && threadIdx.x < kWeightRows) {
      for (int at = 0; at < rows; ++at) bias += shared.gates_by_row[at][threadIdx.x];
    }
    __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < kWeightRows; ++n) {
    const int64_t column = first + n % kWeightColumns;
    if (has_column && column < hidden) {
      static_cast<T*>(params.grad_weight)[(n / kWeightColumns * hidden + column) * depth + k] =
          static_cast<T>(sum[n]);
    }
  }
  const int64_t column = first + threadIdx.x % kWeightColumns;
  if (leads && threadIdx.x < kWeightRows && column < hidden && params.grad_bias != nullptr) {
    static_cast<T*>(params.grad_bias)[threadIdx.x / kWeightColumns * hidden + column] = static_cast<T>(bias);
  }
}

template <typename T>
__global__ void __launch_bounds__(kBackwardThreads) lltm_cell_fused_backward(LltmCellFusedBackward params) {
  __shared__ BackwardShared<Compute<T>> shared;
  const int64_t inputs = input_tiles(params);
  if (blockIdx.x < inputs) {
    input_tile<T>(params, blockIdx.x, shared);
  } else {
    weight_tile<T>(params, blockIdx.x - inputs, shared);
  }
}

// --- launches ---------------------------------------------------------------------------------------------

template <typename Tile>
int64_t blocks_of(const LltmCellFusedForward& params) {
  return ceil_div(params.hidden, Tile::kColumns) * ceil_div(params.batch, Tile::kRows * Tile::kWarps);
}

template <typename T, int kLanes, typename Tile>
void start(const LltmCellFusedForward& params, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned int>(blocks_of<Tile>(params));
  lltm_cell_fused_forward<T, kLanes, Tile><<<blocks, kWarp * Tile::kWarps, 0, stream>>>(params);
}

// A small tile with much of K under way at once where its blocks all run at the same time, and latency is
// what counts; beyond, a larger one that reads less for each product. On an H200, three blocks of the small
// one fit a multiprocessor, of which there are 132. Sums are in the same order in both.
using SmallTile = Tile<4, 2, 4, 2>;
using LargeTile = Tile<4, 4, 4, 1>;
constexpr int64_t kBlocksAtOnce = 3 * 132;

// One row reads each weight once: what counts is how many are under way.
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

extern "C" tch_extension::LaunchStatus tch_extension_lltm_cell_fused_backward_cuda(
    const LltmCellFusedBackward* params, cudaStream_t stream) {
  using namespace tch_extension;
  const int64_t blocks =
      input_tiles(*params) + weight_tiles_along_k(*params) * ceil_div(params->hidden, kWeightColumns);
  if (blocks == 0) return {"lltm_cell_fused_backward", nullptr};
  for_kind(params->kind, [&](auto type) {
    lltm_cell_fused_backward<typename decltype(type)::type>
        <<<static_cast<unsigned int>(blocks), kBackwardThreads, 0, stream>>>(*params);
  });
  return launch_status("lltm_cell_fused_backward");
}

// For the test that compares these structs with their Rust mirrors.
#define AT(member) offsetof(LltmCellFusedForward, member)
extern "C" const size_t tch_extension_lltm_cell_fused_forward_layout[18] = {
    sizeof(LltmCellFusedForward),
    AT(batch),
    AT(features),
    AT(hidden),
    AT(kind),
    AT(vectors),
    AT(input),
    AT(input_stride),
    AT(weight),
    AT(weight_stride),
    AT(bias),
    AT(h),
    AT(h_stride),
    AT(c),
    AT(c_stride),
    AT(new_h),
    AT(new_c),
    AT(activations),
};
#undef AT
#define AT(member) offsetof(LltmCellFusedBackward, member)
extern "C" const size_t tch_extension_lltm_cell_fused_backward_layout[21] = {
    sizeof(LltmCellFusedBackward),
    AT(batch),
    AT(features),
    AT(hidden),
    AT(kind),
    AT(reserved),
    AT(grad_new_h),
    AT(grad_new_c),
    AT(activations),
    AT(new_c),
    AT(input),
    AT(input_stride),
    AT(h),
    AT(h_stride),
    AT(weight),
    AT(weight_stride),
    AT(grad_input),
    AT(grad_weight),
    AT(grad_bias),
    AT(grad_h),
    AT(grad_c),
};
#undef AT
