// What the kernels for the newest token of each row share: rotation, merging of parts, the launch.
#pragma once

#include "../hopper/cluster.h"
#include "../hopper/dependent_launch.h"
#include "params.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension::attention {

constexpr float kNone = -INFINITY;
constexpr int kWarps = kThreads / kWarp;
// At most so many blocks are a cluster, and so many warps a block. Parts are merged by so many.
constexpr int kMostParts = 8;
static_assert(kWarps <= kMostParts);

// What a part with the largest exponent `most` counts beside one with `larger`.
__device__ __forceinline__ float share(float most, float larger) {
  return most == kNone ? 0.0f : exp2f(most - larger);
}

// Σ 2^(score - most) and Σ 2^(score - most) value.
struct Merged {
  float most;
  float total;
  float value;
};

// The value at `d` of parts in memory, which are merged in their order. A part has D values, its
// largest exponent and its total.
template <typename Load>
__device__ __forceinline__ Merged merged(const float* parts, int count, int stride, int dim, int d,
                                         Load load) {
  Merged sum{kNone, 0, 0};
  for (int begin = 0; begin < count; begin += kMostParts) {
    // All loads are under way before the first is used.
    float most[kMostParts], total[kMostParts], value[kMostParts], larger = sum.most;
#pragma unroll
    for (int i = 0; i < kMostParts; ++i) {
      const bool is_there = begin + i < count;
      const float* part = parts + (is_there ? begin + i : begin) * stride;
      most[i] = is_there ? load(part + dim) : kNone;
      total[i] = is_there ? load(part + dim + 1) : 0;
      value[i] = is_there ? load(part + d) : 0;
      larger = fmaxf(larger, most[i]);
    }
    const float before = share(sum.most, larger);
    sum = {larger, sum.total * before, sum.value * before};
#pragma unroll
    for (int i = 0; i < kMostParts; ++i) {
      const float weight = share(most[i], larger);
      sum.total += total[i] * weight;
      sum.value += value[i] * weight;
    }
  }
  return sum;
}

// The heads of queries of a block, which share keys.
struct Unit {
  int64_t row;
  int64_t kv;
  int64_t index;
  // Of all heads of queries of the row, and how many there are.
  int64_t first_head;
  int heads;
  // Whether the block writes the new token to the cache.
  bool writes;
};

__device__ __forceinline__ Unit this_unit(const AttentionDecode& params) {
  const int chunk = static_cast<int>(blockIdx.y % params.chunks);
  const int64_t kv = blockIdx.y / params.chunks, row = blockIdx.z;
  const int64_t first = chunk * params.per_chunk, left = params.group - first;
  const int64_t heads = left < params.per_chunk ? left : params.per_chunk;
  return {row,
          kv,
          row * gridDim.y + blockIdx.y,
          kv * params.group + first,
          static_cast<int>(heads),
          chunk == 0};
}

// How many tokens a row sees. A place outside of the cache has none, and its output is NaN.
__device__ __forceinline__ int64_t tokens_of(const AttentionDecode& params, int64_t place) {
  return 0 <= place && place < params.length ? place + 1 : 0;
}

// The values at `at` of a head, rotated by the row's angles unless there are none.
template <typename T, int kLanes>
__device__ __forceinline__ Vector<T, kLanes> load_rotated(const AttentionDecode& params,
                                                          const void* from, int64_t begin, int at) {
  auto vector = load_vector<T, kLanes>(from, begin + at);
  const int half = static_cast<int>(params.rotated / 2);
  if (at >= 2 * half) return vector;
  const bool is_first = at < half;
  const int pair = is_first ? at : at - half;
  const auto other = load_vector<T, kLanes>(from, begin + (is_first ? at + half : pair));
  const int64_t angle = blockIdx.z * static_cast<int64_t>(half) + pair;
  const auto mine = unpack<T, kLanes>(vector), its = unpack<T, kLanes>(other);
#pragma unroll
  for (int i = 0; i < kLanes; i += 4) {
    const auto cos = load_vector<float, 4>(params.cos, angle + i);
    const auto sin = load_vector<float, 4>(params.sin, angle + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float product = its.lane[i + j] * sin.lane[j];
      vector.lane[i + j] =
          static_cast<T>(fmaf(mine.lane[i + j], cos.lane[j], is_first ? -product : product));
    }
  }
  return vector;
}

// Whether this block is to merge the splits of its unit: the first of a cluster, or the last to
// finish. All of its threads have written their part.
__device__ __forceinline__ bool merges(int* counter) {
#if __CUDA_ARCH__ >= 900
  if (hopper::cluster_size() == gridDim.x) {
    __syncwarp();
    hopper::cluster_arrive();
    if (blockIdx.x != 0) return false;
    hopper::cluster_wait();
    return true;
  }
#endif
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int others = static_cast<int>(gridDim.x) - 1;
    is_last = atomicAdd(counter, 1) == others;
    // For the next call.
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// Merges the parts of a block's warps, [warps, per_chunk, D + 2] in shared memory, and then those
// of the unit's splits, and writes the output.
template <typename T>
__device__ __forceinline__ void finish(const AttentionDecode& params, const Unit& unit,
                                       const float* parts) {
  const int dim = static_cast<int>(params.head_dim), size = dim + 2;
  const int splits = static_cast<int>(gridDim.x), threads = static_cast<int>(blockDim.x);
  const int heads = static_cast<int>(params.per_chunk);
  float* const of_unit = static_cast<float*>(params.partial) + unit.index * splits * heads * size;
  T* const output = static_cast<T*>(params.output) +
                    (unit.row * params.kv_heads * params.group + unit.first_head) * dim;
  for (int index = threadIdx.x; index < unit.heads * dim; index += threads) {
    const int head = index / dim, d = index % dim;
    const auto sum = merged(parts + head * size, kWarps, heads * size, dim, d,
                            [](const float* part) { return *part; });
    if (splits == 1) {
      output[index] = static_cast<T>(sum.value / sum.total);
      continue;
    }
    float* part = of_unit + (static_cast<int>(blockIdx.x) * heads + head) * size;
    part[d] = sum.value;
    if (d == 0) part[dim] = sum.most;
    if (d == 0) part[dim + 1] = sum.total;
  }
  if (splits == 1 || !merges(params.counters + unit.index)) return;
  for (int index = threadIdx.x; index < unit.heads * dim; index += threads) {
    const auto sum = merged(of_unit + index / dim * size, splits, heads * size, dim, index % dim,
                            [](const float* part) { return __ldcg(part); });
    output[index] = static_cast<T>(sum.value / sum.total);
  }
}

// Launches the blocks of each unit, a cluster if it may have so many. They may begin before the
// previous kernel has ended.
template <typename Kernel>
void start(Kernel kernel, const AttentionDecode& params, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned int>(params.splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(params.splits),
                        static_cast<unsigned int>(params.kv_heads * params.chunks),
                        static_cast<unsigned int>(params.batch));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kWarps * params.per_chunk * (params.head_dim + 2) * sizeof(float);
  config.stream = stream;
  config.attrs = attributes;
  // Code that may be launched early also merges in a cluster.
  static hopper::DependentLaunches launches;
  if (launches.are_possible(reinterpret_cast<const void*>(kernel)))
    config.numAttrs = params.splits <= kMostParts ? 2 : 1;
  (void)cudaLaunchKernelEx(&config, kernel, params);
}

// Whether tensor cores compute it: half kinds, and 64, 96 or 128 values a head.
bool is_for_tensor_cores(const AttentionDecode& params);
void start_tensor(const AttentionDecode& params, cudaStream_t stream);

}  // namespace tch_extension::attention
