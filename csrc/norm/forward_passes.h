// The forward pass of rows that do not fit a block's registers: they are read again for each pass,
// mostly from the L2 cache.
#pragma once

#include "forward.h"
#include "kernels.h"

namespace tch_extension::norm {
namespace {

// The block is one team, and reads its row again for each pass.
template <typename Norm, typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads) forward_in_passes(NormForward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int phase = 0;
  const int team = blockDim.x;
  const int64_t vectors = params.columns / kLanes;
  const Scales<C> scales(params.columns);

  auto mean_of_row = [&](int64_t at) {
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
    const C sum_of_row = team_sum<false>(sum, team, buffer, phase).first;
    return pivot<C>(sum_of_row * scales.unscale,
                    static_cast<C>(static_cast<const T*>(params.input)[at]));
  };

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t at = row * params.columns;
    const C mean = Norm::kCentred ? mean_of_row(at) : C(0);

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
    centred = team_sum<false>(centred, team, buffer, phase);
    const auto moments = moments_from<Norm, C>(mean, centred, scales, params.eps);

    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) x.lane[lane] -= mean;
      write_normal<T, kLanes, false>(params, at, index * kLanes, x, moments);
    }
    if (threadIdx.x == 0) keep_moments<Norm>(params, row, moments);
  }
}

template <typename Norm, typename T, int kLanes>
bool start(const NormForward& params, cudaStream_t stream) {
  const NormPlan& plan = params.plan;
  if (!fits_a_block(plan) || plan.team != plan.threads || !aligned<T, kLanes>(params)) return false;
  if (params.rows == 0) return true;
  const unsigned int blocks = at_most(params.rows, INT32_MAX);
  forward_in_passes<Norm, T, kLanes><<<blocks, plan.threads, 0, stream>>>(params);
  return true;
}

}  // namespace

template <typename Norm>
bool start_forward_passes(const NormForward& params, cudaStream_t stream) {
  auto start_of = [&](auto type, auto lanes) {
    return start<Norm, typename decltype(type)::type, lanes()>(params, stream);
  };
  if (params.plan.loads != NormLoads::Narrow) return with_lanes(params, start_of);
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = start_of(type, std::integral_constant<int, kLanesOf8Bytes<T>>{});
  });
  return planned;
}

}  // namespace tch_extension::norm
