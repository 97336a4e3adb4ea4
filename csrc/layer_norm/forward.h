// What the forward's kernels share: a row's moments.
#pragma once

#include "cluster.h"

namespace tch_extension {
namespace {

// So many bytes of a row a thread keeps; src/ops/layer_norm/plan.rs has the same number. Twice as
// many where a block could not hold the row otherwise, half as many where that is enough: fewer
// registers, more rows under way.
constexpr int kBytes = 64;

// A power of two of at most 1 / N, so that nothing is rounded: a sum of N values times this cannot
// overflow where no value does.
template <typename C>
__device__ __forceinline__ C scale_for(int64_t columns) {
  const int exponent = columns > 1 ? 64 - __clzll(columns - 1) : 0;
  return ldexp(C(1), -exponent);
}

// A row of equal values has exactly these for its mean, unless its sum is so long that it rounds by
// more than this. Any other row loses nothing if its deviations are counted from its first value
// where that is as near.
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
  // Where the squares are beyond the largest value, the correction's may be, too, and their
  // difference NaN.
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

// The sum of the team's threads, and the first thread's `first`. A team that is a cluster: of all
// its blocks.
template <Team kTeam, typename C>
__device__ __forceinline__ Pair<C> sum_and_first(C sum, C first, const LayerNormPlan& plan,
                                                 int team, Pair<C>* buffer, int& turn) {
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
    return sum_of_team<kTeam>(Pair<C>{sum, is_first ? first : C(0)}, plan, team, buffer, turn);
  }
}

// As team_sum, where the block is one team of a size that is known: all that the warps left behind
// is read at once. `sums` is nobody else's.
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

// Half of a warp's lanes add up the first, half the second: 5 exchanges instead of 10.
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

// Whether a cluster's blocks can keep the row, kKept bytes a thread.
template <typename T, int kKept>
bool fits_a_cluster(const LayerNormForward& params) {
  const LayerNormPlan& plan = params.plan;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const int64_t all = (params.columns + kLanes - 1) / kLanes;
  const int64_t each = (all + plan.cluster - 1) / plan.cluster;
  return plan.in_registers && plan.team == plan.threads && plan.cluster <= kMostInCluster &&
         each * 16 <= plan.team * int64_t{kKept} && params.rows <= INT32_MAX / plan.cluster;
}

}  // namespace

// For rows that begin anywhere; false if they do not fit the plan.
bool start_layer_norm_forward_shifted(const LayerNormForward& params, cudaStream_t stream);

}  // namespace tch_extension
