// Shared by the CUDA kernels of both directions: how a team of threads computes a row. A team is a
// part of a warp, or one or more warps; a block is one or more teams.
#pragma once

#include <limits>
#include <type_traits>

#include "params.h"
#include "statistic.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/kind.h"
#include "tch_extension/launch.h"

namespace tch_extension::norm {

namespace {

constexpr int kMostThreads = 512;

// The number of a row's values that a thread keeps in the backward pass. Four arrays of that many
// values of the compute kind fit in the 128 registers of a thread of the largest block.
// src/ops/norm/plan.rs has the same numbers.
template <typename T>
constexpr int kBackwardValues = 64 / sizeof(Compute<T>);

template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_or(const void* pointer, int64_t at,
                                                     Compute<T> otherwise) {
  if (pointer != nullptr) return unpack<T, kLanes>(load_vector<T, kLanes>(pointer, at));
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] = otherwise;
  return values;
}

template <typename C>
struct Pair {
  C first, second;
};

// The size of a team is a power of two, so that no division is needed.
__device__ __forceinline__ int thread_of_team(int team) { return threadIdx.x & (team - 1); }
__device__ __forceinline__ int team_of_block(int team) { return threadIdx.x >> (__ffs(team) - 1); }
__device__ __forceinline__ int teams_of_block(int team) { return blockDim.x >> (__ffs(team) - 1); }

// Sums over each group of `lanes` adjacent threads of a warp. All threads of a group get the same
// bits.
template <typename C>
__device__ __forceinline__ Pair<C> warp_sum(Pair<C> sum, int lanes) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset < lanes) {
      sum.first += __shfl_xor_sync(kAllLanes, sum.first, offset);
      sum.second += __shfl_xor_sync(kAllLanes, sum.second, offset);
    }
  }
  return sum;
}

// Sums over the team's threads. All of them get the same bits. `buffer` has room for two sets of
// sums, which calls use alternately: when a thread writes to one set, all threads have arrived at
// the barrier of the call in between, and have therefore read this set. Every thread of the block
// has to call this.
template <bool kWithinWarp, typename C>
__device__ __forceinline__ Pair<C> team_sum(Pair<C> sum, int team, Pair<C>* buffer, int& phase) {
  sum = warp_sum(sum, kWithinWarp ? team : kWarp);
  if constexpr (kWithinWarp) return sum;

  Pair<C>* sums = buffer + phase * (kMostThreads / kWarp);
  phase = 1 - phase;
  const int warp = threadIdx.x / kWarp;
  if (threadIdx.x % kWarp == 0) sums[warp] = sum;
  __syncthreads();
  const int warps_of_team = team / kWarp;
  const int first = warp & -warps_of_team;
  Pair<C> total = {C(0), C(0)};
#pragma unroll 4
  for (int index = first; index < first + warps_of_team; ++index) {
    total.first += sums[index].first;
    total.second += sums[index].second;
  }
  return total;
}

// Calls start(Type<T>{}, lanes) for the kind of the rows, with one lane or as many as 16 bytes
// hold, as the plan says. Returns what it returns: whether the plan fits the arrays.
template <typename Params, typename Start>
bool with_lanes(const Params& params, Start start) {
  bool fits = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    fits = params.plan.loads == NormLoads::Single
               ? start(type, std::integral_constant<int, 1>{})
               : start(type, std::integral_constant<int, kLanesOf16Bytes<T>>{});
  });
  return fits;
}

inline unsigned int at_most(int64_t blocks, int64_t most) {
  return static_cast<unsigned int>(blocks < most ? blocks : most);
}

// The number of blocks if each row has one team.
inline unsigned int blocks_of_teams(int64_t rows, const NormPlan& plan) {
  const int64_t teams = plan.threads / plan.team;
  return at_most((rows + teams - 1) / teams, INT32_MAX);
}

inline bool is_power_of_two(int32_t value) { return value > 0 && (value & (value - 1)) == 0; }

// Whether the plan is one that the kernels can run: a mistake in a plan must not become an access
// out of bounds.
inline bool fits_a_block(const NormPlan& plan) {
  return is_power_of_two(plan.team) && is_power_of_two(plan.threads) &&
         plan.threads <= kMostThreads && plan.threads >= kWarp && plan.team <= plan.threads &&
         plan.cluster >= 1;
}

}  // namespace
}  // namespace tch_extension::norm
