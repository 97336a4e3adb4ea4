// The backward in one kernel. Some blocks compute tiles of dG W, and the other blocks compute tiles
// of dGᵀ [h, x]. Each block computes the part of dG that it needs by itself, which is cheaper than
// waiting for another kernel to write it.

#include <cstddef>

#include "lltm_cell.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {
namespace {

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

// dG of one element, computed from what the forward saved. G is the type of the gradients that one
// step passes to the next.
template <typename T, typename G>
__device__ __forceinline__ GateGradients<Compute<T>> gate_gradients(
    const LltmCellFusedBackward& params, int64_t row, int64_t column) {
  using C = Compute<T>;
  using std::tanh;
  const int64_t at = row * params.hidden + column;
  const T* const activations =
      static_cast<const T*>(params.activations) + row * 3 * params.hidden + column;
  const C i = static_cast<C>(activations[0]), o = static_cast<C>(activations[params.hidden]),
          g = static_cast<C>(activations[2 * params.hidden]);
  const C grad_h =
      value_or_zero<T>(params.grad_new_h, at) + value_or_zero<G>(params.grad_recurrent, at);
  const C tanh_c = tanh(static_cast<C>(static_cast<const T*>(params.new_c)[at]));
  const C grad_c = value_or_zero<G>(params.grad_new_c, at) + grad_h * o * tanh_grad(tanh_c);
  return {{grad_c * elu(g) * sigmoid_grad(i), grad_h * tanh_c * sigmoid_grad(o),
           grad_c * i * elu_grad(g)},
          grad_c};
}

// The number of rows of a tile of dG W, which has 32 columns. Hidden columns are processed in
// pieces, and each warp has its part of every piece.
constexpr int kInputRows = 4;
constexpr int kPiece = 128;
constexpr int kPieceOfWarp = kPiece / kBackwardWarps;
// The number of hidden columns of a tile of dGᵀ [h, x], which has 32 columns for each warp. Rows
// are processed in pieces.
constexpr int kWeightColumns = 4;
constexpr int kWeightRows = 3 * kWeightColumns;
constexpr int kRowsOfPiece = kBackwardThreads / kWeightColumns;

template <typename C>
union alignas(16) BackwardShared {
  C gates[3][kPiece][kInputRows];  // rows last: one load gets all of them
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

// The number of tiles of dGᵀ [h, x] along K. If the weight's gradient is not asked for, there is
// one tile for the gradients of the bias and c.
__host__ __device__ int64_t weight_tiles_along_k(const LltmCellFusedBackward& params) {
  if (params.grad_weight != nullptr)
    return ceil_div(params.hidden + params.features, kBackwardThreads);
  const bool others = params.grad_c != nullptr && params.grad_gates == nullptr;
  return params.grad_bias != nullptr || others ? 1 : 0;
}

// For a sequence: writes what the product for the weight's gradient reads, and what the preceding
// step reads.
template <typename T, typename G>
__device__ __forceinline__ void write_gates(const LltmCellFusedBackward& params, int64_t row,
                                            int64_t column,
                                            const GateGradients<Compute<T>>& gradients) {
  T* const to = static_cast<T*>(params.grad_gates) + row * 3 * params.hidden + column;
#pragma unroll
  for (int gate = 0; gate < 3; ++gate)
    to[gate * params.hidden] = static_cast<T>(gradients.gate[gate]);
  if (params.grad_c != nullptr) {
    static_cast<G*>(params.grad_c)[row * params.hidden + column] = static_cast<G>(gradients.c);
  }
}

template <typename T, typename G>
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
  const bool writes_gates = params.grad_gates != nullptr && tile % tiles == 0;
  // Lanes beyond the last column read the last column again.
  const T* const weight = static_cast<const T*>(params.weight) + min(column, columns.end - 1);

  C sum[kInputRows] = {};
  for (int64_t piece = 0; piece < hidden; piece += kPiece) {
    // These loads are issued before dG is computed, because they take longest.
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
        gradients = gate_gradients<T, G>(params, first_row + r, piece + j);
        if (writes_gates) write_gates<T, G>(params, first_row + r, piece + j, gradients);
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
    static_cast<G*>(params.grad_h)[row * hidden + column] = static_cast<G>(total);
  } else {
    static_cast<T*>(params.grad_input)[row * params.features + column - hidden] =
        static_cast<T>(total);
  }
}

template <typename T, typename G>
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
  const T* const from = of_h ? static_cast<const T*>(params.h) + k
                             : static_cast<const T*>(params.input) + (k - hidden);
  const int64_t stride = of_h ? params.h_stride : params.input_stride;

  C sum[kWeightRows] = {};
  C bias = 0;
  for (int64_t piece = 0; piece < params.batch; piece += kRowsOfPiece) {
    const int rows =
        static_cast<int>(min(static_cast<int64_t>(kRowsOfPiece), params.batch - piece));
    const int r = threadIdx.x / kWeightColumns, j = threadIdx.x % kWeightColumns;
    if (r < rows) {
      GateGradients<C> gradients = {};
      if (first + j < hidden) {
        gradients = gate_gradients<T, G>(params, piece + r, first + j);
        if (leads && params.grad_c != nullptr) {
          static_cast<G*>(params.grad_c)[(piece + r) * hidden + first + j] =
              static_cast<G>(gradients.c);
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
    if (leads && params.grad_bias != nullptr && threadIdx.x < kWeightRows) {
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
    static_cast<T*>(params.grad_bias)[threadIdx.x / kWeightColumns * hidden + column] =
        static_cast<T>(bias);
  }
}

template <typename T, typename G>
__global__ void __launch_bounds__(kBackwardThreads)
    lltm_cell_fused_backward(LltmCellFusedBackward params) {
  __shared__ BackwardShared<Compute<T>> shared;
  const int64_t inputs = input_tiles(params);
  if (blockIdx.x < inputs) {
    input_tile<T, G>(params, blockIdx.x, shared);
  } else {
    weight_tile<T, G>(params, blockIdx.x - inputs, shared);
  }
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_lltm_cell_fused_backward_cuda(
    const LltmCellFusedBackward* params, cudaStream_t stream) {
  using namespace tch_extension;
  const int64_t blocks = input_tiles(*params) +
                         weight_tiles_along_k(*params) * ceil_div(params->hidden, kWeightColumns);
  if (blocks == 0) return {"lltm_cell_fused_backward", nullptr};
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto kernel =
        params->wide ? lltm_cell_fused_backward<T, Compute<T>> : lltm_cell_fused_backward<T, T>;
    kernel<<<static_cast<unsigned int>(blocks), kBackwardThreads, 0, stream>>>(*params);
  });
  return launch_status("lltm_cell_fused_backward");
}
