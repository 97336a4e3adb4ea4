// The forward pass of rows that do not fit a block's registers: they are read again for each pass,
// mostly from the L2 cache.

#include "forward.h"

namespace tch_extension {
namespace {

// The block is one team, and reads its row again for each pass.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads)
    layer_norm_forward_in_passes(LayerNormForward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int turn = 0;
  const int team = blockDim.x;
  const int64_t vectors = params.columns / kLanes;
  const Scales<C> scales(params.columns);

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t at = row * params.columns;
    // One sum per lane: shorter chains of additions lose less precision.
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
    const C mean = pivot<C>(sum_of_row * scales.unscale,
                            static_cast<C>(static_cast<const T*>(params.input)[at]));

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

template <typename T, int kLanes>
bool start(const LayerNormForward& params, cudaStream_t stream) {
  const LayerNormPlan& plan = params.plan;
  if (!fits_a_block(plan) || plan.team != plan.threads || !aligned<T, kLanes>(params)) return false;
  if (params.rows == 0) return true;
  const unsigned int blocks = at_most(params.rows, INT32_MAX);
  layer_norm_forward_in_passes<T, kLanes><<<blocks, plan.threads, 0, stream>>>(params);
  return true;
}

}  // namespace

bool start_layer_norm_forward_passes(const LayerNormForward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = params.plan.loads == LayerNormLoads::Single
                  ? start<T, 1>(params, stream)
                  : start<T, kLanesOf16Bytes<T>>(params, stream);
  });
  return planned;
}

}  // namespace tch_extension
