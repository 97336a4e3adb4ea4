// Attention of the newest token of each row to the tokens before it, whose number is on the device:
// keys and values are read once, and only those in use. Floor: their bytes.
//
// A unit is a row, a head of keys, and up to kGroup heads of queries that share it. The tokens of a
// unit are cut into splits, a thread block for each, which are a cluster where there are clusters.
// A team of lanes reads 16 bytes each of a token's key, and of its value, and keeps a running
// softmax of the tokens that it has seen. Teams, warps and then splits are merged. The first block
// of a cluster merges the splits, or, where there are no clusters, the last block of a unit to
// finish; in their order, so that the same sizes and splits give the same bits.
//
// Queries and the new key may be rotated as they are read.
#include "../hopper/memory.h"
#include "decode.h"

namespace tch_extension::attention {
namespace {

// Bytes that L2 fetches at a time.
constexpr int kLine = 128;

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

// The tokens of a block.
struct Range {
  int64_t from;
  int64_t to;
};

__device__ __forceinline__ Range range_of(const AttentionDecode& params, int64_t place) {
  const int64_t count = tokens_of(params, place);
  const int64_t of_split = (count + gridDim.x - 1) / gridDim.x;
  const int64_t from = blockIdx.x * of_split;
  return {from, from + of_split < count ? from + of_split : count};
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
  const Unit unit = this_unit(params);
  const int lanes = static_cast<int>(params.lanes);
  const int lane = static_cast<int>(threadIdx.x) % lanes,
            team = static_cast<int>(threadIdx.x) / lanes;
  const int64_t teams = kThreads / lanes;
  const int at = lane * kLanes;
  const bool is_inside = at < dim;
  const int64_t of_cache = (unit.row * params.kv_heads + unit.kv) * params.length * dim + at;

  // Until the previous kernel has ended, the place may be an older one, and the cache may be
  // written. L2 is asked for what will probably be read first.
  if (unit.writes && is_inside && at * sizeof(T) % kLine == 0) {
    const Range likely = range_of(params, hopper::load_relaxed(params.places + unit.row));
    const int64_t first = likely.from + kAhead * teams;
    const int64_t end = first < likely.to ? first : likely.to;
    for (int64_t token = likely.from + team; token < end; token += teams) {
      hopper::prefetch(static_cast<const T*>(params.keys) + of_cache + token * dim);
      hopper::prefetch(static_cast<const T*>(params.values) + of_cache + token * dim);
    }
  }
  hopper::wait_for_previous_kernel();

  // Loaded along with the queries, which do not depend on it.
  const int64_t place = params.places[unit.row];
  float query[kGroup][kLanes];
#pragma unroll
  for (int g = 0; g < kGroup; ++g) {
    const bool is_there = is_inside && g < unit.heads;
    const int64_t begin =
        unit.row * params.query_strides[0] + (unit.first_head + g) * params.query_strides[1];
    const auto loaded =
        is_there ? load_rotated<T, kLanes>(params, params.query, begin, at) : Vector<T, kLanes>{};
#pragma unroll
    for (int i = 0; i < kLanes; ++i)
      query[g][i] = static_cast<float>(loaded.lane[i]) * params.scale;
  }
  const auto [from, to] = range_of(params, place);

  const int64_t new_key = unit.row * params.key_strides[0] + unit.kv * params.key_strides[1];
  const int64_t new_value =
      unit.row * params.value_strides[0] + unit.kv * params.value_strides[1] + at;
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
      keys[i] = load_rotated<T, kLanes>(params, params.key, new_key, at);
      values[i] = load_vector<T, kLanes>(params.value, new_value);
      if (!unit.writes) continue;
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

  finish<T>(params, unit, parts);
}

template <typename T>
void start_for(const AttentionDecode& params, cudaStream_t stream) {
  switch (params.per_chunk) {
    case 1:
      return start(decode_kernel<T, 1>, params, stream);
    case 2:
      return start(decode_kernel<T, 2>, params, stream);
    case 4:
      return start(decode_kernel<T, 4>, params, stream);
    default:
      return start(decode_kernel<T, 8>, params, stream);
  }
}

}  // namespace
}  // namespace tch_extension::attention

extern "C" tch_extension::LaunchStatus tch_extension_attention_decode_cuda(
    const AttentionDecode* params, cudaStream_t stream) {
  using namespace tch_extension;
  if (attention::is_for_tensor_cores(*params)) {
    attention::start_tensor(*params, stream);
    return launch_status("attention_decode");
  }
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    // Rust takes other ways for double.
    if constexpr (!std::is_same_v<T, double>) attention::start_for<T>(*params, stream);
  });
  return launch_status("attention_decode");
}
