// Adds rows to those of a table at sorted indices. The kernels are memory-bound: the first reads
// each row once, and the table's row once for each run of equal indices. Every sum has an order
// that depends on the indices alone.

#include "params.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::nn {
namespace {

// The indices of a block; CHUNK in src/nn/kernels.rs.
constexpr int kChunk = 32;
// The vectors that a thread asks for at a time.
constexpr int kAhead = 8;

// The indices of a chunk, with those before and after it: -1 where there is none.
struct Chunk {
  int count;
  int32_t indices[kChunk + 2];
  int64_t places[kChunk];

  __device__ __forceinline__ int32_t index(int at) const { return indices[at + 1]; }
  // Whether a run, or the chunk's part of it, ends here.
  __device__ __forceinline__ bool ends(int at) const {
    return at + 1 == count || index(at + 1) != index(at);
  }
  __device__ __forceinline__ bool began_before(int at) const { return index(at) == index(-1); }
  __device__ __forceinline__ bool goes_on(int at) const { return index(at) == index(count); }
};

__device__ __forceinline__ bool is_row(const NnAddRows& params, int32_t index) {
  return index >= 0 && index < params.rows;
}

// Sums, and their parts, are of the type in which rows are computed.
template <typename T, int kLanes>
using Sum = Values<Compute<T>, kLanes>;

template <typename C, typename T, int kLanes>
__device__ __forceinline__ void add(Values<C, kLanes>& sum, const Vector<T, kLanes>& vector) {
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) sum.lane[lane] += static_cast<C>(vector.lane[lane]);
}

// Adds a row of the table to a sum that was made for it.
template <typename T, int kLanes>
__device__ __forceinline__ void add_to_row(const NnAddRows& params, int64_t at,
                                           const Vector<T, kLanes>& row, Sum<T, kLanes> sum) {
  add(sum, row);
  Values<T, kLanes> rounded;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) rounded.lane[lane] = sum.lane[lane];
  store_values(params.table, at, rounded);
}

// A thread's first column, and from there to its next one.
template <int kLanes>
__device__ __forceinline__ int64_t first_column() {
  return (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kLanes;
}
template <int kLanes>
__device__ __forceinline__ int64_t column_step() {
  return static_cast<int64_t>(gridDim.y) * blockDim.x * kLanes;
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) add_runs(const __grid_constant__ NnAddRows params) {
  __shared__ Chunk chunk;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int64_t rest = params.count - begin;
  const int count = static_cast<int>(rest < kChunk ? rest : kChunk);
  if (threadIdx.x == 0) chunk.count = count;
  for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
    const int64_t at = begin + i - 1;
    chunk.indices[i] = at >= 0 && at < params.count ? params.indices[at] : -1;
  }
  for (int i = threadIdx.x; i < count; i += blockDim.x) chunk.places[i] = params.places[begin + i];
  __syncthreads();
  for (int64_t column = first_column<kLanes>(); column < params.columns;
       column += column_step<kLanes>()) {
    const auto part = [&](int which) {
      return (2 * static_cast<int64_t>(blockIdx.x) + which) * params.columns + column;
    };
    Sum<T, kLanes> sum = {};
    for (int first = 0; first < count; first += kAhead) {
      Vector<T, kLanes> grads[kAhead];
      Vector<T, kLanes> rows[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = first + i;
        if (at >= count) continue;
        grads[i] = load_vector<T, kLanes>(params.grad, chunk.places[at] * params.columns + column);
        const bool is_whole = chunk.ends(at) && !chunk.began_before(at) && !chunk.goes_on(at);
        if (is_whole && is_row(params, chunk.index(at))) {
          rows[i] = load_vector<T, kLanes>(params.table, chunk.index(at) * params.columns + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = first + i;
        if (at >= count) continue;
        add(sum, grads[i]);
        if (!chunk.ends(at)) continue;
        if (chunk.began_before(at)) {
          store_values(params.partial, part(0), sum);
        } else if (chunk.goes_on(at)) {
          store_values(params.partial, part(1), sum);
        } else if (is_row(params, chunk.index(at))) {
          add_to_row<T, kLanes>(params, chunk.index(at) * params.columns + column, rows[i], sum);
        }
        sum = {};
      }
    }
  }
}

// A block for each border between chunks. That of the first border that a run crosses adds up the
// run's parts.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) add_parts(const __grid_constant__ NnAddRows params) {
  const int64_t chunks = ceil_div(params.count, int64_t{kChunk});
  const int64_t before = blockIdx.x;
  const int64_t border = (before + 1) * kChunk;
  const int64_t begin = before * kChunk;
  const int32_t index = params.indices[border];
  const bool is_crossed = params.indices[border - 1] == index;
  const bool is_first = begin == 0 || params.indices[begin - 1] != index;
  if (!is_crossed || !is_first || !is_row(params, index)) return;
  for (int64_t column = first_column<kLanes>(); column < params.columns;
       column += column_step<kLanes>()) {
    using C = Compute<T>;
    auto sum = load_values<C, kLanes>(params.partial, (2 * before + 1) * params.columns + column);
    bool goes_on = true;
    for (int64_t first = before + 1; goes_on; first += kAhead) {
      Vector<C, kLanes> parts[kAhead];
      bool is_part[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = first + i;
        is_part[i] = at < chunks && params.indices[at * kChunk] == index;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t at = 2 * (first + i) * params.columns + column;
        if (is_part[i]) parts[i] = load_vector<C, kLanes>(params.partial, at);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (is_part[i]) add(sum, parts[i]);
      }
      // The indices are sorted: if the last one is there, so are those before it.
      goes_on = is_part[kAhead - 1];
    }
    const int64_t at = index * params.columns + column;
    add_to_row<T, kLanes>(params, at, load_vector<T, kLanes>(params.table, at), sum);
  }
}

template <typename T, int kLanes>
void start(const NnAddRows& params, cudaStream_t stream) {
  const int64_t vectors = ceil_div(params.columns, int64_t{kLanes});
  const int64_t warps = ceil_div(vectors < kThreads ? vectors : int64_t{kThreads}, int64_t{kWarp});
  const auto threads = static_cast<unsigned int>(warps * kWarp);
  constexpr int64_t kMostTiles = 65535;
  const int64_t tiles = ceil_div(vectors, int64_t{threads});
  const auto chunks = static_cast<unsigned int>(ceil_div(params.count, int64_t{kChunk}));
  dim3 blocks(chunks, static_cast<unsigned int>(tiles < kMostTiles ? tiles : kMostTiles));
  add_runs<T, kLanes><<<blocks, threads, 0, stream>>>(params);
  if (chunks == 1) return;
  blocks.x = chunks - 1;
  add_parts<T, kLanes><<<blocks, threads, 0, stream>>>(params);
}

template <typename T>
void start(const NnAddRows& params, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const bool is_whole = params.columns % kLanes == 0 && is_aligned_to_16(params.grad) &&
                        is_aligned_to_16(params.table) && is_aligned_to_16(params.partial);
  is_whole ? start<T, kLanes>(params, stream) : start<T, 1>(params, stream);
}

}  // namespace
}  // namespace tch_extension::nn

extern "C" tch_extension::LaunchStatus tch_extension_nn_add_rows_cuda(const NnAddRows* params,
                                                                      cudaStream_t stream) {
  constexpr const char* kName = "nn_add_rows";
  if (params->count == 0 || params->columns == 0) return {kName, nullptr};
  using tch_extension::nn::start;
  switch (params->kind) {
    case kTchExtensionDouble:
      start<double>(*params, stream);
      break;
    case kTchExtensionHalf:
      start<__half>(*params, stream);
      break;
    case kTchExtensionBFloat16:
      start<__nv_bfloat16>(*params, stream);
      break;
    default:
      start<float>(*params, stream);
  }
  return tch_extension::launch_status(kName);
}
