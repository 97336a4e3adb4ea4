// The forward pass of rows that are sums: h = x + residual, where dropout may come before the sum,
// and y = norm(h). Memory is touched once: x and residual are read, h and y are written. As in
// forward_registers.h, a team keeps its row in registers. A thread has half as many bytes of it,
// because it loads two arrays.
#pragma once

#include "../hopper/dependent_launch.h"
#include "add.h"
#include "add_kernels.h"
#include "forward.h"
#include "philox.h"

namespace tch_extension::norm {
namespace {

// The bytes of a row of T that a thread keeps; src/ops/norm/plan.rs has the same number. A thread
// keeps twice as many if a block could not hold the row otherwise.
constexpr int kBytesOfSum = kBytes / 2;

// A team computes one row. Each thread keeps kKept bytes of x, and as many values of the residual.
template <typename Norm, typename T, typename S, int kKept, Team kTeam, bool kDrops>
__global__ void __launch_bounds__(kMostThreads, (sizeof(T) == 8 || kKept > kBytesOfSum ? 1 : 2))
    add_forward(NormAddForward params) {
  using C = Compute<T>;
  using Stream = StreamVector<T, S>;
  constexpr int kLanes = kLanesOf16Bytes<T>, kVectors = kKept / 16;
  __shared__ Pair<C> buffer[kPairsOfSums<kTeam>];
  int phase = 0;
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  const int team = params.plan.team, thread = thread_of_team(team);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * teams_of_block(team) + team_of_block(team);
  // Threads without a row do not return, because all threads of a block meet in the sums.
  const int vectors = row < params.rows ? static_cast<int>(params.columns / kLanes) : 0;
  const int64_t row_at = row * params.columns;
  auto is_there = [&](int v) { return v * team + thread < vectors; };
  auto at = [&](int v) { return row_at + int64_t{v * team + thread} * kLanes; };

  Vector<T, kLanes> branch[kVectors];
  Stream stream[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_there(v)) continue;
    branch[v] = load_vector<T, kLanes>(params.input, at(v));
    stream[v] = Stream::load(params.residual, at(v));
  }
  const Scales<C> scales(params.columns);
  if constexpr (kDrops) {
    if (params.kept_state != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
      keep_state(params.random, params.kept_state);
  }

  // The row is the rounded sum, because that is what others read.
  Values<S, kLanes> x[kVectors];
  C sum(0);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_there(v)) continue;
    Values<T, kLanes> added = unpack<T, kLanes>(branch[v]);
    if constexpr (kDrops) {
      const Dropout<C> dropout(params.random, params.dropout);
      dropout.template apply<T, kLanes>(added, at(v));
    }
    x[v] = stream[v].values();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) x[v].lane[lane] += added.lane[lane];
    const Stream rounded = Stream::of(x[v]);
    rounded.store(params.sum, at(v));
    x[v] = rounded.values();
    if constexpr (Norm::kCentred) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sum += x[v].lane[lane] * scales.scale;
    }
  }
  C mean(0);
  if constexpr (Norm::kCentred) {
    const C first = is_there(0) ? x[0].lane[0] : C(0);
    const Pair<C> of_row = sum_and_first<kTeam>(sum, first, params.plan, team, buffer, phase);
    mean = pivot<C>(of_row.first * scales.unscale, of_row.second);
  }

  // x - mean replaces x.
  Pair<C> centred = {C(0), C(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_there(v)) continue;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const C difference = x[v].lane[lane] - mean;
      x[v].lane[lane] = difference;
      centred.first += difference * scales.scale;
      centred.second += difference * difference;
    }
  }
  centred = sum_of_team<kTeam>(centred, params.plan, team, buffer, phase);
  const auto moments = moments_from<Norm, C>(mean, centred, scales, params.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (!is_there(v)) continue;
    const int64_t column = int64_t{v * team + thread} * kLanes;
    const auto weight = stream_values_or<T, S>(params.weight, column, C(1));
    const auto bias = stream_values_or<T, S>(params.bias, column, C(0));
    Values<T, kLanes> y;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const C normal = (x[v].lane[lane] - moments.correction) * moments.rstd;
      y.lane[lane] = normal * weight.lane[lane] + bias.lane[lane];
    }
    store_values<T, kLanes>(params.output, row_at + column, y);
  }
  if (thread == 0 && row < params.rows) keep_moments<Norm>(params, row, moments);
}

template <typename T>
bool fits_sum(const NormAddForward& params) {
  const NormPlan& plan = params.plan;
  const int64_t kept = plan.team <= kWarp ? kBytesOfSum : 2 * kBytesOfSum;
  return params.parameter_kind == params.stream_kind && fits_a_block(plan) &&
         params.columns % kLanesOf16Bytes<T> == 0 &&
         are_aligned({params.input, params.residual, params.weight, params.bias, params.sum,
                      params.output}) &&
         params.columns * int64_t{sizeof(T)} <= plan.team * kept &&
         params.rows <= int64_t{INT32_MAX} * (plan.threads / plan.team);
}

template <typename Norm, typename T, typename S, bool kDrops>
void start_sum(const NormAddForward& params, cudaStream_t stream) {
  const NormPlan& plan = params.plan;
  const unsigned int blocks = blocks_of_teams(params.rows, plan);
  auto start = [&](auto* kernel) {
    if (hopper::is_short(blocks))
      return hopper::launch_early(kernel, blocks, plan.threads, 0, stream, params);
    kernel<<<blocks, plan.threads, 0, stream>>>(params);
  };
  if (params.columns * int64_t{sizeof(T)} > plan.team * int64_t{kBytesOfSum}) {
    start(add_forward<Norm, T, S, 2 * kBytesOfSum, Team::kBlock, kDrops>);
  } else if (plan.team <= kWarp) {
    start(add_forward<Norm, T, S, kBytesOfSum, Team::kWithinWarp, kDrops>);
  } else {
    start(add_forward<Norm, T, S, kBytesOfSum, Team::kBlock, kDrops>);
  }
}

}  // namespace

template <typename Norm>
bool start_add_forward(const NormAddForward& params, cudaStream_t stream) {
  return with_kinds_of_sum(params.kind, params.stream_kind, [&](auto type, auto stream_type) {
    using T = typename decltype(type)::type;
    using S = typename decltype(stream_type)::type;
    if (!fits_sum<T>(params)) return false;
    if (params.rows == 0) return true;
    params.dropout > 0 ? start_sum<Norm, T, S, true>(params, stream)
                       : start_sum<Norm, T, S, false>(params, stream);
    return true;
  });
}

}  // namespace tch_extension::norm
