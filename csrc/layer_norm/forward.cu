// The forward. A team keeps its row in registers, so that memory is read once: 2·M·N values move, and the
// parameters. What is under way at a time decides the speed, and so do registers: 64 bytes a thread, and as
// many small blocks as fit. Rows beyond what a block's registers hold are read again for each pass, mostly
// from the L2 cache.

#include "row_team.h"

namespace tch_extension {
namespace {

// So many bytes of a row a thread keeps; src/ffi/layer_norm/plan.rs has the same number. Twice as many where
// a block could not hold the row otherwise, half as many where that is enough: fewer registers, more rows
// under way.
constexpr int kBytes = 64;
// And where fewer than 16 bytes are loaded at a time, at most 16 values.
template <typename T>
constexpr int kBytesOfSingles = 16 * sizeof(T) < kBytes ? 16 * sizeof(T) : kBytes;

// A power of two of at most 1 / N, so that nothing is rounded: a sum of N values times this cannot overflow
// where no value does.
template <typename C>
__device__ __forceinline__ C scale_for(int64_t columns) {
  const int exponent = columns > 1 ? 64 - __clzll(columns - 1) : 0;
  return ldexp(C(1), -exponent);
}

// A row of equal values has exactly these for its mean, unless its sum is so long that it rounds by more than
// this. Any other row loses nothing if its deviations are counted from its first value where that is as near.
template <typename C>
__device__ __forceinline__ C pivot(C mean, C first) {
  const C distance = mean < first ? first - mean : mean - first;
  const C size = first < C(0) ? -first : first;
  return distance <= C(32) * std::numeric_limits<C>::epsilon() * size ? first : mean;
}

// The rounded mean (or what is as near), what is missing of it, and 1 / √(variance + eps).
template <typename C>
struct Moments {
  C mean, correction, rstd;
};

// 1 / √a: the fast one has two wrong bits, which a step of Newton's method puts right.
__device__ __forceinline__ float inverse_root(float a) {
  const float root = rsqrtf(a);
  const float better = fmaf(0.5f * root, fmaf(-a * root, root, 1.f), root);
  return isfinite(better) ? better : root;
}
__device__ __forceinline__ double inverse_root(double a) { return 1.0 / sqrt(a); }

// What all rows share: divisions take long.
template <typename C>
struct Scales {
  C scale;    // of scale_for
  C unscale;  // 1 / (N scale): makes a mean of a scaled sum
  C inverse;  // 1 / N

  __device__ __forceinline__ explicit Scales(int64_t columns) : scale(scale_for<C>(columns)) {
    unscale = C(1) / (static_cast<C>(columns) * scale);
    inverse = unscale * scale;
  }
};

// From the scaled sum of x - mean, and the sum of its squares.
template <typename C>
__device__ __forceinline__ Moments<C> moments_from(C mean, Pair<C> sums, const Scales<C>& scales,
                                                   double eps) {
  const C correction = sums.first * scales.unscale;
  const C mean_square = sums.second * scales.inverse;
  // Where the squares are beyond the largest value, the correction's may be, too, and their difference NaN.
  const C variance = isinf(mean_square) ? mean_square : mean_square - correction * correction;
  // Not max, which would drop NaN.
  const C positive = variance < C(0) ? C(0) : variance;
  return {mean, correction, inverse_root(positive + static_cast<C>(eps))};
}

template <typename C>
__device__ __forceinline__ void keep_moments(const LayerNormForward& params, int64_t row,
                                             const Moments<C>& moments) {
  if (params.mean != nullptr) static_cast<C*>(params.mean)[row] = moments.mean + moments.correction;
  if (params.rstd != nullptr) static_cast<C*>(params.rstd)[row] = moments.rstd;
}

// `centred` is x - mean.
// The parameters at a column; kThere: they are there for certain.
template <typename T, int kLanes, bool kThere>
__device__ __forceinline__ Values<T, kLanes> load_parameter(const void* pointer, int64_t at,
                                                            Compute<T> otherwise) {
  if constexpr (kThere) return unpack<T, kLanes>(load_vector<T, kLanes>(pointer, at));
  return load_or<T, kLanes>(pointer, at, otherwise);
}

template <typename T, int kLanes, bool kAffine>
__device__ __forceinline__ void write_normal(const LayerNormForward& params, int64_t row_at, int64_t column,
                                             const Values<T, kLanes>& centred,
                                             const Moments<Compute<T>>& moments) {
  const auto weight = load_parameter<T, kLanes, kAffine>(params.weight, column, Compute<T>(1));
  const auto bias = load_parameter<T, kLanes, kAffine>(params.bias, column, Compute<T>(0));
  Values<T, kLanes> y;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    const Compute<T> normal = (centred.lane[lane] - moments.correction) * moments.rstd;
    y.lane[lane] = normal * weight.lane[lane] + bias.lane[lane];
  }
  store_values<T, kLanes>(params.output, row_at + column, y);
}

// Kernels for any team of a part of a warp, or of warps; others are for one size of team, and for a weight
// and a bias: what does not change from launch to launch costs no instructions.
constexpr int kAnyPartOfWarp = 0;
constexpr int kAnyWarps = -1;

template <int kTeam>
constexpr bool kWithinWarp = kTeam >= 0 && kTeam <= kWarp;

// So many threads a block has at most.
template <int kTeam>
constexpr int kThreadsOfBlock = kTeam <= 0          ? kMostThreads
                                : kTeam < 2 * kWarp ? 2 * kWarp
                                                    : kTeam;

// As many blocks at a time as leave 64 registers a thread, where those are enough.
template <typename T, int kLanes, int kKept, int kTeam>
constexpr int kBlocksAtATime = sizeof(T) == 8 || kKept / sizeof(T) > 32 ? 1 : 1024 / kThreadsOfBlock<kTeam>;

// The sum of the team's threads, and the first thread's `first`.
template <bool kPartOfWarp, typename C>
__device__ __forceinline__ Pair<C> sum_and_first(C sum, C first, int team, Pair<C>* buffer, int& turn) {
  if constexpr (kPartOfWarp) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset < team) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    return {sum, __shfl_sync(kAllLanes, first, 0, team)};
  } else {
    return team_sum<false>(Pair<C>{sum, thread_of_team(team) == 0 ? first : C(0)}, team, buffer, turn);
  }
}

// A team does one row. A thread keeps kKept bytes.
template <typename T, int kLanes, int kKept, int kTeam, bool kAffine = (kTeam > 0)>
__global__ void __launch_bounds__(kThreadsOfBlock<kTeam>, (kBlocksAtATime<T, kLanes, kKept, kTeam>))
    layer_norm_forward_in_registers(LayerNormForward params) {
  using C = Compute<T>;
  constexpr int kVectors = kKept / sizeof(T) / kLanes;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int turn = 0;
  const int team = kTeam > 0 ? kTeam : params.plan.team;
  const int thread = thread_of_team(team);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * teams_of_block(team) + team_of_block(team);
  const int64_t at = row * params.columns;
  // A block's threads stay together, whether they have a row or not: they meet in the sums.
  const int vectors = row < params.rows ? static_cast<int>(params.columns / kLanes) : 0;

  Vector<T, kLanes> stored[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * team + thread;
    if (index < vectors) stored[v] = load_vector<T, kLanes>(params.input, at + index * kLanes);
  }
  const Scales<C> scales(params.columns);
  Values<T, kLanes> x[kVectors];
  C sum(0), first(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * team + thread < vectors) {
      x[v] = unpack<T, kLanes>(stored[v]);
      if (v == 0) first = x[0].lane[0];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sum += x[v].lane[lane] * scales.scale;
    }
  }
  const Pair<C> sum_of_row = sum_and_first<kWithinWarp<kTeam>>(sum, first, team, buffer, turn);
  const C mean = pivot<C>(sum_of_row.first * scales.unscale, sum_of_row.second);

  // x - mean takes the place of x.
  Pair<C> centred = {C(0), C(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v * team + thread < vectors) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C difference = x[v].lane[lane] - mean;
        x[v].lane[lane] = difference;
        centred.first += difference * scales.scale;
        centred.second += difference * difference;
      }
    }
  }
  centred = team_sum<kWithinWarp<kTeam>>(centred, team, buffer, turn);
  const auto moments = moments_from<C>(mean, centred, scales, params.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * team + thread;
    if (index < vectors) write_normal<T, kLanes, kAffine>(params, at, index * kLanes, x[v], moments);
  }
  if (thread == 0 && row < params.rows) keep_moments(params, row, moments);
}

// The block is the team.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads) layer_norm_forward_in_passes(LayerNormForward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int turn = 0;
  const int team = blockDim.x;
  const int64_t vectors = params.columns / kLanes;
  const Scales<C> scales(params.columns);

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t at = row * params.columns;
    // A sum for each lane: the shorter the sums, the less is lost.
    C sums[kLanes] = {};
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x.lane[lane] * scales.scale;
    }
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum.first += sums[lane];
    const C sum_of_row = team_sum<false>(sum, team, buffer, turn).first;
    const C mean =
        pivot<C>(sum_of_row * scales.unscale, static_cast<C>(static_cast<const T*>(params.input)[at]));

    Pair<C> by_lane[kLanes] = {};
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C difference = x.lane[lane] - mean;
        by_lane[lane].first += difference * scales.scale;
        by_lane[lane].second += difference * difference;
      }
    }
    Pair<C> centred = {C(0), C(0)};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      centred.first += by_lane[lane].first;
      centred.second += by_lane[lane].second;
    }
    centred = team_sum<false>(centred, team, buffer, turn);
    const auto moments = moments_from<C>(mean, centred, scales, params.eps);

    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) x.lane[lane] -= mean;
      write_normal<T, kLanes, false>(params, at, index * kLanes, x, moments);
    }
    if (threadIdx.x == 0) keep_moments(params, row, moments);
  }
}

// Null counts as aligned.
template <typename T, int kLanes>
bool aligned(const LayerNormForward& params) {
  return params.columns % kLanes == 0 && is_aligned<T, kLanes>(params.input) &&
         is_aligned<T, kLanes>(params.weight) && is_aligned<T, kLanes>(params.bias) &&
         is_aligned<T, kLanes>(params.output);
}

template <typename T, int kLanes>
bool fits(const LayerNormForward& params) {
  const LayerNormPlan& plan = params.plan;
  if (params.kind != params.parameter_kind || !fits_a_block(plan) || plan.cluster != 1) return false;
  if (!aligned<T, kLanes>(params)) return false;
  if (!plan.in_registers) return plan.team == plan.threads;
  constexpr bool kWide = kLanes == kLanesOf16Bytes<T>;
  const int64_t kept = !kWide ? kBytesOfSingles<T> : plan.team <= kWarp ? kBytes : 2 * kBytes;
  return params.columns * int64_t{sizeof(T)} <= plan.team * kept &&
         params.rows <= int64_t{INT32_MAX} * (plan.threads / plan.team);
}

template <typename T, int kLanes>
bool start(const LayerNormForward& params, cudaStream_t stream) {
  if (!fits<T, kLanes>(params)) return false;
  if (params.rows == 0) return true;
  const LayerNormPlan& plan = params.plan;
  const int64_t teams = plan.threads / plan.team;
  const unsigned int blocks = at_most((params.rows + teams - 1) / teams, INT32_MAX);
  auto start_kernel = [&](auto* kernel) { kernel<<<blocks, plan.threads, 0, stream>>>(params); };
  const int64_t kept = params.columns * int64_t{sizeof(T)};
  const bool affine = params.weight != nullptr && params.bias != nullptr;
  constexpr bool kWide = kLanes == kLanesOf16Bytes<T>;
  if (!plan.in_registers) {
    start_kernel(layer_norm_forward_in_passes<T, kLanes>);
    return true;
  }
  if constexpr (kWide) {
    if (kept > plan.team * int64_t{kBytes}) {
      start_kernel(layer_norm_forward_in_registers<T, kLanes, 2 * kBytes, kAnyWarps>);
      return true;
    }
    if (affine && plan.threads == (plan.team < 2 * kWarp ? 2 * kWarp : plan.team)) {
      const bool half = kept <= plan.team * int64_t{kBytes / 2};
      switch (plan.team) {
        case 8:
          start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, 8>);
          return true;
        case 16:
          start_kernel(half ? layer_norm_forward_in_registers<T, kLanes, kBytes / 2, 16>
                            : layer_norm_forward_in_registers<T, kLanes, kBytes, 16>);
          return true;
        case 32:
          start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, 32>);
          return true;
        case 64:
          start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, 64>);
          return true;
        case 128:
          start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, 128>);
          return true;
        case 256:
          start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, 256>);
          return true;
        case 512:
          start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, 512>);
          return true;
        default:
          break;
      }
    }
  }
  constexpr int kKept = kWide ? kBytes : kBytesOfSingles<T>;
  if (!kWide && affine) {
    plan.team <= kWarp ? start_kernel(layer_norm_forward_in_registers<T, kLanes, kKept, kAnyPartOfWarp, true>)
                       : start_kernel(layer_norm_forward_in_registers<T, kLanes, kKept, kAnyWarps, true>);
    return true;
  }
  plan.team <= kWarp ? start_kernel(layer_norm_forward_in_registers<T, kLanes, kKept, kAnyPartOfWarp>)
                     : start_kernel(layer_norm_forward_in_registers<T, kLanes, kKept, kAnyWarps>);
  return true;
}

}  // namespace

const char* start_layer_norm_forward(const LayerNormForward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = params.plan.lanes == kLanesOf16Bytes<T>  ? start<T, kLanesOf16Bytes<T>>(params, stream)
              : params.plan.lanes == kLanesOf4Bytes<T> ? start<T, kLanesOf4Bytes<T>>(params, stream)
              : params.plan.lanes == 1                 ? start<T, 1>(params, stream)
                                                       : false;
  });
  return planned ? nullptr : "internal error: the plan does not fit the arrays";
}

}  // namespace tch_extension
