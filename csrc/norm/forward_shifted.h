// The forward pass of rows that begin at any address: odd numbers of columns, and views of larger
// arrays. It works as in forward_registers.h, but loads and stores rows with the functions of
// shifted.h. Doubles need no such kernel, because their rows begin at multiples of 8 bytes.
#pragma once

#include "forward.h"
#include "kernels.h"
#include "shifted.h"

namespace tch_extension::norm {
namespace {

// Calls `action` for the first `count` lanes of a vector.
template <int kLanes, typename Action>
__device__ __forceinline__ void for_lanes(int count, Action action) {
  if (count >= kLanes) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) action(lane);
  } else {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (lane < count) action(lane);
    }
  }
}

// A team computes one row. Each thread keeps kKept bytes of it.
template <typename Norm, typename T, int kKept, Team kTeam>
__global__ void __launch_bounds__(kTeam == Team::kWithinWarp ? 2 * kWarp : kMostThreads,
                                  kKept > kBytes               ? 1
                                  : kTeam == Team::kWithinWarp ? 12
                                                               : 2)
    forward_shifted(NormForward params) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>, kVectors = kKept / 16;
  __shared__ Pair<C> buffer[kPairsOfSums<kTeam>];
  // No block may write into the shared memory of a block that has not started.
  if constexpr (kTeam == Team::kCluster) arrive_at_cluster_barrier();
  int phase = 0;
  const int team = params.plan.team;
  const Columns mine =
      columns_of_block(params.columns, kLanes, kTeam == Team::kCluster ? params.plan.cluster : 1);
  const int64_t row =
      kTeam == Team::kCluster
          ? static_cast<int64_t>(blockIdx.x / params.plan.cluster)
          : static_cast<int64_t>(blockIdx.x) * teams_of_block(team) + team_of_block(team);
  const bool is_row = row < params.rows;
  const int64_t at = is_row ? row * params.columns + mine.column : 0;
  const int columns = is_row ? mine.columns : 0;
  const Group group(team, mine.vectors);
  auto count = [&](int v) { return v < group.vectors ? columns - group.index(v) * kLanes : 0; };

  // The values stay in the kind in which they are stored, and are converted again in each pass:
  // that takes half as many registers in half precision.
  Words x[kVectors];
  const T* input = static_cast<const T*>(params.input);
  load_shifted<T>(input + at, input + params.rows * params.columns, columns, group, x);
  // The parameters of the first vector are loaded now: if there are few rows, it is the only
  // vector, and nothing else hides the latency.
  const Parameter<T> weight(params.weight, params.columns), bias(params.bias, params.columns);
  Words stored_weight = weight.load(mine.column + int64_t{group.index(0)} * kLanes);
  Words stored_bias = bias.load(mine.column + int64_t{group.index(0)} * kLanes);
  const Scales<C> scales(params.columns);
  C sum(0), mean(0);
  if constexpr (Norm::kCentred) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto values = unpack<T>(x[v]);
      for_lanes<kLanes>(count(v), [&](int lane) { sum += values.lane[lane] * scales.scale; });
    }
  }
  const C first = unpack<T>(x[0]).lane[0];
  if constexpr (kTeam == Team::kCluster) wait_at_cluster_barrier();
  if constexpr (Norm::kCentred) {
    const Pair<C> sum_of_row = sum_and_first<kTeam>(sum, first, params.plan, team, buffer, phase);
    mean = pivot<C>(sum_of_row.first * scales.unscale, sum_of_row.second);
  }

  Pair<C> centred = {C(0), C(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const auto values = unpack<T>(x[v]);
    for_lanes<kLanes>(count(v), [&](int lane) {
      const C difference = values.lane[lane] - mean;
      centred.first += difference * scales.scale;
      centred.second += difference * difference;
    });
  }
  centred = sum_of_team<kTeam>(centred, params.plan, team, buffer, phase);
  const auto moments = moments_from<Norm, C>(mean, centred, scales, params.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v >= group.vectors) break;
    if (v > 0) {
      const int64_t column = mine.column + int64_t{group.index(v)} * kLanes;
      stored_weight = weight.load(column);
      stored_bias = bias.load(column);
    }
    const auto w = weight.values(stored_weight, C(1)), b = bias.values(stored_bias, C(0));
    auto values = unpack<T>(x[v]);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const C normal = (values.lane[lane] - mean - moments.correction) * moments.rstd;
      values.lane[lane] = normal * w.lane[lane] + b.lane[lane];
    }
    x[v] = pack<T>(values);
  }
  store_shifted<T>(static_cast<T*>(params.output) + at, columns, group, x);
  if (thread_of_team(team) == 0 && mine.column == 0 && is_row)
    keep_moments<Norm>(params, row, moments);
}

template <typename Norm, typename T>
bool start(const NormForward& params, cudaStream_t stream) {
  const NormPlan& plan = params.plan;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  if (!fits_a_block(plan)) return false;
  if (plan.way == NormWay::Cluster) {
    if (!fits_a_cluster<T, kLanes, kBytes>(params)) return false;
    if (params.rows == 0) return true;
    const ClusterLaunch launch(plan, 0, params.rows, stream);
    cudaLaunchKernelEx(&launch.config, forward_shifted<Norm, T, kBytes, Team::kCluster>, params);
    return true;
  }
  if (params.rows > int64_t{INT32_MAX} * (plan.threads / plan.team)) return false;
  const int64_t kept = (params.columns + kLanes - 1) / kLanes * 16;
  if (kept > plan.team * int64_t{plan.team <= kWarp ? kBytes : 2 * kBytes}) return false;
  if (plan.team <= kWarp && plan.threads > 2 * kWarp) return false;
  if (params.rows == 0) return true;
  const unsigned int blocks = blocks_of_teams(params.rows, plan);
  auto start_kernel = [&](auto* kernel) { kernel<<<blocks, plan.threads, 0, stream>>>(params); };
  if (kept > plan.team * int64_t{kBytes}) {
    start_kernel(forward_shifted<Norm, T, 2 * kBytes, Team::kBlock>);
  } else if (plan.team <= kWarp) {
    start_kernel(forward_shifted<Norm, T, kBytes, Team::kWithinWarp>);
  } else {
    start_kernel(forward_shifted<Norm, T, kBytes, Team::kBlock>);
  }
  return true;
}

}  // namespace

template <typename Norm>
bool start_forward_shifted(const NormForward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) < sizeof(double)) planned = start<Norm, T>(params, stream);
  });
  return planned;
}

}  // namespace tch_extension::norm
