// Attention of the newest token of each row to the tokens before it, whose number is on the device:
// keys and values are read once, and only those in use. Floor: their bytes.
//
// A unit is a row, a head of keys, and up to kGroup heads of queries that share it. The tokens of a
// unit are cut into splits, a thread block for each. A team of lanes reads 16 bytes each of a
// token's key, and of its value, and keeps a running softmax of the tokens that it has seen. Teams,
// warps and then splits are merged; the last block of a unit to finish merges the splits in their
// order, so that the same sizes and splits give the same bits.
#include "../hopper/dependent_launch.h"
#include "../hopper/memory.h"
#include "params.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension::attention {
namespace {

constexpr int kWarps = kThreads / kWarp;
// Bytes that L2 fetches at a time.
constexpr int kLine = 128;
constexpr float kNone = -INFINITY;

// What a part with the largest exponent `most` counts beside one with `larger`.
__device__ __forceinline__ float share(float most, float larger) {
  return most == kNone ? 0.0f : exp2f(most - larger);
}

// Σ 2^(score - most) and Σ 2^(score - most) value, of the values of one lane.
template <int kLanes>
struct Sums {
  float most = kNone;
  float total = 0;
  float values[kLanes] = {};

  __device__ __forceinline__ void add(float score, const float (&value)[kLanes]) {
    const float larger = fmaxf(most, score);
    const float before = share(most, larger), now = share(score, larger);
    most = larger;
    total = total * before + now;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) values[i] = values[i] * before + now * value[i];
  }

  // Adds those of the lane at this distance.
  __device__ __forceinline__ void add_from(int distance) {
    const float other = __shfl_xor_sync(kAllLanes, most, distance);
    const float larger = fmaxf(most, other);
    const float before = share(most, larger), with = share(other, larger);
    most = larger;
    total = total * before + __shfl_xor_sync(kAllLanes, total, distance) * with;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const float value = __shfl_xor_sync(kAllLanes, values[i], distance);
      values[i] = values[i] * before + value * with;
    }
  }
};

constexpr int kMostSplits = 32;
// A split of fewer tokens takes less time than merging it.
constexpr int64_t kTokens = 64;

// The tokens of a block, and how many blocks of its unit have some.
struct Range {
  int splits;
  int64_t from;
  int64_t to;
};

// As many splits as the tokens are worth; the other blocks have nothing to do.
__device__ __forceinline__ Range range_of(const AttentionDecode& params, int64_t place) {
  // A place outside of the cache has no tokens, and the result is NaN.
  const bool is_valid = 0 <= place && place < params.length;
  const int64_t count = is_valid ? place + 1 : 0;
  const int64_t worth = (count + kTokens - 1) / kTokens;
  const int splits = static_cast<int>(worth < 1 ? 1 : worth < gridDim.x ? worth : gridDim.x);
  if (static_cast<int>(blockIdx.x) >= splits) return {splits, 0, 0};
  const int64_t of_split = (count + splits - 1) / splits;
  const int64_t from = blockIdx.x * of_split;
  return {splits, from, from + of_split < count ? from + of_split : count};
}

template <typename T, int kGroup>
__global__ void __launch_bounds__(kThreads)
    decode_kernel(const __grid_constant__ AttentionDecode params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  // Tokens of which a team has the loads in flight.
  constexpr int kAhead = 2;
  extern __shared__ float parts[];  // [kWarps, kGroup, D + 2]
  hopper::allow_next_kernel();
  const int dim = static_cast<int>(params.head_dim);
  const int size = dim + 2;
  const int chunk = static_cast<int>(blockIdx.y % params.chunks);
  const int64_t kv = blockIdx.y / params.chunks, row = blockIdx.z;
  const int64_t unit = row * gridDim.y + blockIdx.y;
  const int first_of_group = chunk * kGroup;
  const int group = static_cast<int>(params.group);
  const int64_t first_head = kv * group + first_of_group;
  const int lanes = static_cast<int>(params.lanes);
  const int lane = static_cast<int>(threadIdx.x) % lanes,
            team = static_cast<int>(threadIdx.x) / lanes;
  const int64_t teams = kThreads / lanes;
  const int at = lane * kLanes;
  const bool is_inside = at < dim;
  const int64_t of_cache = (row * params.kv_heads + kv) * params.length * dim + at;

  // Until the previous kernel has ended, the place may be an older one, and the cache may be
  // written. L2 is asked for what will probably be read.
  if (chunk == 0 && is_inside && at * sizeof(T) % kLine == 0) {
    const Range likely = range_of(params, hopper::load_relaxed(params.places + row));
    for (int64_t token = likely.from + team; token < likely.to; token += teams) {
      hopper::prefetch(static_cast<const T*>(params.keys) + of_cache + token * dim);
      hopper::prefetch(static_cast<const T*>(params.values) + of_cache + token * dim);
    }
  }
  hopper::wait_for_previous_kernel();

  // Loaded along with the queries, which do not depend on it.
  const int64_t place = params.places[row];
  float query[kGroup][kLanes];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const bool is_there = is_inside && first_of_group + g < group;
    const int64_t begin =
        row * params.query_strides[0] + (first_head + g) * params.query_strides[1];
    const auto loaded =
        is_there ? load_vector<T, kLanes>(params.query, begin + at) : Vector<T, kLanes>{};
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      query[g][i] = static_cast<float>(loaded.lane[i]) * params.scale;
  }
  const auto [splits, from, to] = range_of(params, place);
  if (static_cast<int>(blockIdx.x) >= splits) return;

  const int64_t new_key = row * params.key_strides[0] + kv * params.key_strides[1] + at;
  const int64_t new_value = row * params.value_strides[0] + kv * params.value_strides[1] + at;
  Sums<kLanes> sums[kGroup];
  // All teams of a warp go round equally often, because they shuffle together.
  for (int64_t begin = from; begin < to; begin += kAhead * teams) {
    Vector<T, kLanes> keys[kAhead], values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t token = begin + i * teams + team;
      keys[i] = values[i] = Vector<T, kLanes>{};
      if (token >= to || !is_inside) continue;
      const int64_t cached = of_cache + token * dim;
      if (token != place) {
        keys[i] = load_vector<T, kLanes>(params.keys, cached);
        values[i] = load_vector<T, kLanes>(params.values, cached);
        continue;
      }
      keys[i] = load_vector<T, kLanes>(params.key, new_key);
      values[i] = load_vector<T, kLanes>(params.value, new_value);
      if (chunk != 0) continue;
      *reinterpret_cast<Vector<T, kLanes>*>(static_cast<T*>(params.keys) + cached) = keys[i];
      *reinterpret_cast<Vector<T, kLanes>*>(static_cast<T*>(params.values) + cached) = values[i];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const Values<T, kLanes> key = unpack<T, kLanes>(keys[i]),
                              value = unpack<T, kLanes>(values[i]);
#pragma unroll
      for (int g = 0; g < kGroup; ++g) {
        float score = 0;
#pragma unroll
        for (int j = 0; j < kLanes; ++j) score += query[g][j] * key.lane[j];
        for (int step = lanes / 2; step > 0; step /= 2)
          score += __shfl_xor_sync(kAllLanes, score, step);
        if (begin + i * teams + team < to) sums[g].add(score, value.lane);
      }
    }
  }

  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    for (int step = lanes; step < kWarp; step *= 2) sums[g].add_from(step);
    float* part = parts + (warp * kGroup + g) * size;
    if (threadIdx.x % kWarp >= lanes || !is_inside) continue;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) part[at + i] = sums[g].values[i];
    if (lane == 0) part[dim] = sums[g].most;
    if (lane == 0) part[dim + 1] = sums[g].total;
  }
  __syncthreads();

  const auto output = [&](int g, int d) -> T& {
    return static_cast<T*>(
        params.output)[(row * params.kv_heads * group + first_head + g) * dim + d];
  };
  const int here = min(kGroup, group - first_of_group);
  float* const of_unit = static_cast<float*>(params.partial) + unit * gridDim.x * kGroup * size;
  for (int index = threadIdx.x; index < here * dim; index += kThreads) {
    const int g = index / dim, d = index % dim;
    float most = kNone, total = 0, value = 0;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, parts[(w * kGroup + g) * size + dim]);
    for (int w = 0; w < kWarps; ++w) {
      const float* part = parts + (w * kGroup + g) * size;
      const float weight = share(part[dim], most);
      total += part[dim + 1] * weight;
      value += part[d] * weight;
    }
    if (splits == 1) {
      output(g, d) = static_cast<T>(value / total);
      continue;
    }
    float* part = of_unit + (static_cast<int64_t>(blockIdx.x) * kGroup + g) * size;
    part[d] = value;
    if (d == 0) part[dim] = most;
    if (d == 0) part[dim + 1] = total;
  }
  if (splits == 1) return;

  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(params.counters + unit, 1) == splits - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  // What each split counts: a warp for a head, a lane for a split.
  __shared__ float weights[kGroup][kMostSplits];
  for (int g = warp; g < here; g += kWarps) {
    const int split = static_cast<int>(threadIdx.x) % kWarp;
    const float* part = of_unit + (split * kGroup + g) * size;
    const float most = split < splits ? __ldcg(part + dim) : kNone;
    float largest = most;
    for (int step = kWarp / 2; step > 0; step /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, step));
    const float weight = share(most, largest);
    float total = split < splits ? __ldcg(part + dim + 1) * weight : 0.0f;
    for (int step = kWarp / 2; step > 0; step /= 2)
      total += __shfl_xor_sync(kAllLanes, total, step);
    weights[g][split] = weight / total;
  }
  __syncthreads();
  for (int index = threadIdx.x; index < here * dim; index += kThreads) {
    const int g = index / dim, d = index % dim;
    float value = 0;
#pragma unroll 8
    for (int split = 0; split < splits; ++split)
      value += __ldcg(of_unit + (split * kGroup + g) * size + d) * weights[g][split];
    output(g, d) = static_cast<T>(value);
  }
  // For the next call.
  if (threadIdx.x == 0) params.counters[unit] = 0;
}

template <typename T, int kGroup>
void start(const AttentionDecode& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned int>(params.splits),
                  static_cast<unsigned int>(params.kv_heads * params.chunks),
                  static_cast<unsigned int>(params.batch));
  const size_t shared = kWarps * kGroup * (params.head_dim + 2) * sizeof(float);
  hopper::launch_early(decode_kernel<T, kGroup>, grid, dim3(kThreads), shared, stream, params);
}

template <typename T>
void start_for(const AttentionDecode& params, cudaStream_t stream) {
  switch (params.per_chunk) {
    case 1:
      return start<T, 1>(params, stream);
    case 2:
      return start<T, 2>(params, stream);
    case 4:
      return start<T, 4>(params, stream);
    default:
      return start<T, 8>(params, stream);
  }
}

}  // namespace
}  // namespace tch_extension::attention

extern "C" tch_extension::LaunchStatus tch_extension_attention_decode_cuda(
    const AttentionDecode* params, cudaStream_t stream) {
  using namespace tch_extension;
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    // Rust takes other ways for double.
    if constexpr (!std::is_same_v<T, double>) attention::start_for<T>(*params, stream);
  });
  return launch_status("attention_decode");
}
