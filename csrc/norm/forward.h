// Shared by the kernels of the forward pass: a row's moments.
#pragma once

#include "cluster.h"

namespace tch_extension::norm {
namespace {

// The bytes of a row that a thread keeps; src/ops/norm/plan.rs has the same number. A thread
// keeps twice as many if a block could not hold the row otherwise, and half as many if that is
// enough: with fewer registers per thread, more rows are in flight.
constexpr int kBytes = 64;

// A power of two of at most 1 / N. Scaling by it rounds nothing, and a sum of N scaled values
// cannot overflow if no value does.
template <typename C>
__device__ __forceinline__ C scale_for(int64_t columns) {
  const int exponent = columns > 1 ? 64 - __clzll(columns - 1) : 0;
  return ldexp(C(1), -exponent);
}

// Returns the row's first value instead of the mean if the two differ by no more than rounding. The
// mean of a row of equal values is then exactly that value, unless its sum is so long that it
// rounds by more than this tolerance. Other rows lose nothing if their deviations are taken from
// their first value, because it is as near.
template <typename C>
__device__ __forceinline__ C pivot(C mean, C first) {
  const C distance = mean < first ? first - mean : mean - first;
  const C size = first < C(0) ? -first : first;
  return distance <= C(32) * std::numeric_limits<C>::epsilon() * size ? first : mean;
}

// The rounded mean (or the row's first value if that is as near), the correction to be added to it,
// and 1 / √(variance + eps).
template <typename C>
struct Moments {
  C mean, correction, rstd;
};

// 1 / √a. The last two bits of rsqrtf are wrong; a step of Newton's method corrects them.
__device__ __forceinline__ float inverse_root(float a) {
  const float root = rsqrtf(a);
  const float better = fmaf(0.5f * root, fmaf(-a * root, root, 1.f), root);
  return isfinite(better) ? better : root;
}
__device__ __forceinline__ double inverse_root(double a) { return 1.0 / sqrt(a); }

// Values that all rows share, because divisions are slow.
template <typename C>
struct Scales {
  C scale;    // scale_for(N)
  C unscale;  // 1 / (N · scale): turns a scaled sum into a mean
  C inverse;  // 1 / N

  __device__ __forceinline__ explicit Scales(int64_t columns) : scale(scale_for<C>(columns)) {
    unscale = C(1) / (static_cast<C>(columns) * scale);
    inverse = unscale * scale;
  }
};

// The moments, from the scaled sum of x - mean and the sum of its squares.
template <typename Norm, typename C>
__device__ __forceinline__ Moments<C> moments_from(C mean, Pair<C> sums, const Scales<C>& scales,
                                                   double eps) {
  const C correction = Norm::kCentred ? sums.first * scales.unscale : C(0);
  const C mean_square = sums.second * scales.inverse;
  // If the squares overflow, the correction's square may overflow, too, and their difference would
  // be NaN.
  const C variance = isinf(mean_square) ? mean_square : mean_square - correction * correction;
  // Not max(), which would drop NaN.
  const C positive = variance < C(0) ? C(0) : variance;
  return {mean, correction, inverse_root(positive + static_cast<C>(eps))};
}

template <typename Norm, typename Params, typename C>
__device__ __forceinline__ void keep_moments(const Params& params, int64_t row,
                                             const Moments<C>& moments) {
  if (Norm::kCentred && params.mean != nullptr)
    static_cast<C*>(params.mean)[row] = moments.mean + moments.correction;
  if (params.rstd != nullptr) static_cast<C*>(params.rstd)[row] = moments.rstd;
}

// The sum over the team's threads, and `first` of its first thread. If the team is a cluster, both
// are for all its blocks.
template <Team kTeam, typename C>
__device__ __forceinline__ Pair<C> sum_and_first(C sum, C first, const NormPlan& plan, int team,
                                                 Pair<C>* buffer, int& phase) {
  if constexpr (kTeam == Team::kWithinWarp) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      if (offset < team) sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    return {sum, __shfl_sync(kAllLanes, first, 0, team)};
  } else {
    const bool is_first =
        thread_of_team(team) == 0 &&
        (kTeam != Team::kCluster || blockIdx.x % static_cast<unsigned int>(plan.cluster) == 0);
    return sum_of_team<kTeam>(Pair<C>{sum, is_first ? first : C(0)}, plan, team, buffer, phase);
  }
}

// team_sum for a block that is one team, whose size is known at compile time: all sums of the warps
// are read at once. `sums` must not be used by any other call.
template <int kTeam, typename C>
__device__ __forceinline__ C block_sum(C sum, C (&sums)[kTeam / kWarp]) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  C total(0);
#pragma unroll
  for (const C& of_warp : sums) total += of_warp;
  return total;
}

// Half of a warp's lanes add up the first values, the other half the second: 5 shuffles instead of
// 10.
template <int kTeam, typename C>
__device__ __forceinline__ Pair<C> block_sum(Pair<C> sum, Pair<C> (&sums)[kTeam / kWarp]) {
  constexpr int kHalf = kWarp / 2;
  const bool is_second = threadIdx.x & kHalf;
  C mine = is_second ? sum.second : sum.first;
  mine += __shfl_xor_sync(kAllLanes, is_second ? sum.first : sum.second, kHalf);
#pragma unroll
  for (int offset = kHalf / 2; offset > 0; offset /= 2)
    mine += __shfl_xor_sync(kAllLanes, mine, offset);
  Pair<C>& of_warp = sums[threadIdx.x / kWarp];
  if (threadIdx.x % kHalf == 0) (is_second ? of_warp.second : of_warp.first) = mine;
  __syncthreads();
  Pair<C> total = {C(0), C(0)};
#pragma unroll
  for (const Pair<C>& one : sums) {
    total.first += one.first;
    total.second += one.second;
  }
  return total;
}

// A parameter's values at a column. kThere: the parameter is known to be present.
template <typename T, int kLanes, bool kThere>
__device__ __forceinline__ Values<T, kLanes> load_parameter(const void* pointer, int64_t at,
                                                            Compute<T> otherwise) {
  if constexpr (kThere) return unpack<T, kLanes>(load_vector<T, kLanes>(pointer, at));
  return load_or<T, kLanes>(pointer, at, otherwise);
}

// Writes the outputs of one vector. `centred` is x - mean.
template <typename T, int kLanes, bool kAffine>
__device__ __forceinline__ void write_normal(const NormForward& params, int64_t row_at,
                                             int64_t column, const Values<T, kLanes>& centred,
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

// Whether kLanes values can be loaded at a time. Null counts as aligned.
template <typename T, int kLanes>
bool aligned(const NormForward& params) {
  return params.columns % kLanes == 0 && is_aligned<T, kLanes>(params.input) &&
         is_aligned<T, kLanes>(params.weight) && is_aligned<T, kLanes>(params.bias) &&
         is_aligned<T, kLanes>(params.output);
}

// The lanes of NormLoads::Narrow.
template <typename T>
constexpr int kLanesOf8Bytes = 8 / sizeof(T);

// Whether the blocks of a cluster can keep a row in registers, with kKept bytes per thread.
template <typename T, int kLanes, int kKept>
bool fits_a_cluster(const NormForward& params) {
  const NormPlan& plan = params.plan;
  const int64_t all = (params.columns + kLanes - 1) / kLanes;
  const int64_t each = (all + plan.cluster - 1) / plan.cluster;
  return plan.team == plan.threads && plan.cluster <= kMostInCluster &&
         each * kLanes * int64_t{sizeof(T)} <= plan.team * int64_t{kKept} &&
         params.rows <= INT32_MAX / plan.cluster;
}

}  // namespace

}  // namespace tch_extension::norm
