// The forward pass of rows that begin at multiples of 16 bytes, or of 8. A team, or a cluster,
// keeps its row in registers, so that memory is read once: 2·M·N values are moved, and the
// parameters. The number of bytes in flight decides the speed, and the registers limit it: each
// thread keeps 64 bytes, and as many small blocks run as fit.
#pragma once

#include "forward.h"
#include "kernels.h"

namespace tch_extension::norm {
namespace {

// Values of kTeam for kernels that work for any team within a warp, any team of warps, or a
// cluster. A positive kTeam stands for a kernel for this size of team only, with a weight and a
// bias: what is known at compile time costs no instructions.
constexpr int kAnyPartOfWarp = 0;
constexpr int kAnyWarps = -1;
constexpr int kBlocksOfCluster = -2;

// The bytes of a row that a thread of a cluster keeps. They are twice as many for floats, which
// need no more registers for that.
template <typename T>
constexpr int kClusterBytes = sizeof(T) == 4 ? 2 * kBytes : kBytes;

template <int kTeam>
constexpr Team kTeamOf = kTeam == kBlocksOfCluster      ? Team::kCluster
                         : kTeam >= 0 && kTeam <= kWarp ? Team::kWithinWarp
                                                        : Team::kBlock;

// The largest number of threads of a block.
template <int kTeam>
constexpr int kThreadsOfBlock = kTeam <= 0          ? kMostThreads
                                : kTeam < 2 * kWarp ? 2 * kWarp
                                                    : kTeam;

// The number of blocks per multiprocessor: as many as leave 64 registers per thread, if those are
// enough.
template <typename T, int kLanes, int kKept, int kTeam>
constexpr int kBlocksAtATime =
    sizeof(T) == 8 || kKept / sizeof(T) > 32 ? 1 : 1024 / kThreadsOfBlock<kTeam>;

// A team computes one row. Each thread keeps kKept bytes of it. kFull: every thread of every block
// has that many bytes, and a block is one team.
template <typename Norm, typename T, int kLanes, int kKept, int kTeam, bool kFull = false,
          bool kAffine = (kTeam > 0)>
__global__ void __launch_bounds__(kThreadsOfBlock<kTeam>, (kBlocksAtATime<T, kLanes, kKept, kTeam>))
    forward_in_registers(NormForward params) {
  using C = Compute<T>;
  constexpr int kVectors = kKept / sizeof(T) / kLanes;
  constexpr Team kKind = kTeamOf<kTeam>;
  constexpr int kWarps = kFull ? kTeam / kWarp : 1;
  __shared__ Pair<C> buffer[kFull ? 1 : kPairsOfSums<kKind>];
  __shared__ __align__(16) C sums_of_warps[kWarps];
  __shared__ __align__(16) Pair<C> pairs_of_warps[kWarps];
  // No block may write into the shared memory of a block that has not started.
  if constexpr (kKind == Team::kCluster) arrive_at_cluster_barrier();
  int phase = 0;
  const int team = kTeam > 0 ? kTeam : params.plan.team;
  const int thread = thread_of_team(team);
  const int64_t columns = kFull ? int64_t{kTeam} * kVectors * kLanes : params.columns;
  int64_t row, column = 0;
  int vectors;
  if constexpr (kKind == Team::kCluster) {
    const Columns mine = columns_of_block(columns, kLanes, params.plan.cluster);
    row = blockIdx.x / params.plan.cluster;
    column = mine.column;
    vectors = mine.vectors;
  } else {
    row = static_cast<int64_t>(blockIdx.x) * teams_of_block(team) + team_of_block(team);
    // Threads without a row do not return, because all threads of a block meet in the sums.
    vectors = row < params.rows ? static_cast<int>(columns / kLanes) : 0;
  }
  const int64_t row_at = row * columns, at = row_at + column;
  // Counting the thread's vectors takes fewer registers if there are twice as many of them.
  constexpr bool kNarrow = kLanes < kLanesOf16Bytes<T>;
  const int mine = (vectors - thread + team - 1) >> (__ffs(team) - 1);
  auto is_there = [&](int v) {
    return kFull || (kNarrow ? v < mine : v * team + thread < vectors);
  };

  Vector<T, kLanes> stored[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (is_there(v))
      stored[v] = load_vector<T, kLanes>(params.input, at + (v * team + thread) * kLanes);
  }
  C first(0);
  if constexpr (kFull) first = static_cast<C>(static_cast<const T*>(params.input)[row_at]);
  const Scales<C> scales(columns);
  Values<T, kLanes> x[kVectors];
  // Several independent sums if there are registers for them, so that an addition does not wait for
  // the previous one.
  constexpr int kSums = kFull ? 4 : 1;
  C sums[kSums] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (is_there(v)) {
      x[v] = unpack<T, kLanes>(stored[v]);
      if constexpr (Norm::kCentred) {
        if (v == 0 && !kFull) first = x[0].lane[0];
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane)
          sums[lane % kSums] += x[v].lane[lane] * scales.scale;
      }
    }
  }
  C sum(0);
#pragma unroll
  for (const C& one : sums) sum += one;
  if constexpr (kKind == Team::kCluster) wait_at_cluster_barrier();
  if constexpr (!Norm::kCentred) {
    // Nothing is subtracted.
  } else if constexpr (kFull) {
    sum = block_sum<kTeam>(sum, sums_of_warps);
  } else {
    const Pair<C> sum_of_row = sum_and_first<kKind>(sum, first, params.plan, team, buffer, phase);
    sum = sum_of_row.first;
    first = sum_of_row.second;
  }
  const C mean = Norm::kCentred ? pivot<C>(sum * scales.unscale, first) : C(0);

  // x - mean replaces x.
  Pair<C> centred = {C(0), C(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (is_there(v)) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C difference = x[v].lane[lane] - mean;
        x[v].lane[lane] = difference;
        centred.first += difference * scales.scale;
        centred.second += difference * difference;
      }
    }
  }
  if constexpr (kFull) {
    centred = block_sum<kTeam>(centred, pairs_of_warps);
  } else {
    centred = sum_of_team<kKind>(centred, params.plan, team, buffer, phase);
  }
  const auto moments = moments_from<Norm, C>(mean, centred, scales, params.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (is_there(v)) {
      const int64_t at_column = column + (v * team + thread) * kLanes;
      write_normal<T, kLanes, kAffine>(params, row_at, at_column, x[v], moments);
    }
  }
  if (thread == 0 && column == 0 && row < params.rows) keep_moments<Norm>(params, row, moments);
}

template <typename T, int kLanes>
bool fits(const NormForward& params) {
  const NormPlan& plan = params.plan;
  if (!fits_a_block(plan) || !aligned<T, kLanes>(params)) return false;
  if (plan.way == NormWay::Cluster) return fits_a_cluster<T, kLanes, kClusterBytes<T>>(params);
  const int64_t kept = plan.team <= kWarp ? kBytes : 2 * kBytes;
  return params.columns * int64_t{sizeof(T)} <= plan.team * kept &&
         params.rows <= int64_t{INT32_MAX} * (plan.threads / plan.team);
}

// The kernel for exactly the plan's size of team, with a weight and a bias. It is null if there is
// none; there is none for doubles, nor for loads of 8 bytes.
template <typename Norm, typename T>
auto kernel_of_one_team(const NormForward& params) -> void (*)(NormForward) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const NormPlan& plan = params.plan;
  const bool is_affine = params.weight != nullptr && params.bias != nullptr;
  if (!is_affine || plan.threads != (plan.team < 2 * kWarp ? 2 * kWarp : plan.team)) return nullptr;
  const int64_t bytes = params.columns * int64_t{sizeof(T)};
  const bool is_half = bytes <= plan.team * int64_t{kBytes / 2};
  const bool is_full = bytes == plan.team * int64_t{kBytes};
  if constexpr (sizeof(T) < sizeof(double)) {
    switch (plan.team) {
      case 8:
        return forward_in_registers<Norm, T, kLanes, kBytes, 8>;
      case 16:
        return is_half ? forward_in_registers<Norm, T, kLanes, kBytes / 2, 16>
                       : forward_in_registers<Norm, T, kLanes, kBytes, 16>;
      case 32:
        return forward_in_registers<Norm, T, kLanes, kBytes, 32>;
      case 64:
        return forward_in_registers<Norm, T, kLanes, kBytes, 64>;
      case 128:
        return forward_in_registers<Norm, T, kLanes, kBytes, 128>;
      case 256:
        return is_full ? forward_in_registers<Norm, T, kLanes, kBytes, 256, true>
                       : forward_in_registers<Norm, T, kLanes, kBytes, 256>;
      case 512:
        return is_full ? forward_in_registers<Norm, T, kLanes, kBytes, 512, true>
                       : forward_in_registers<Norm, T, kLanes, kBytes, 512>;
    }
  }
  return nullptr;
}

// Starts the kernel whose threads load kLanes values at a time. Returns whether the plan fits.
template <typename Norm, typename T, int kLanes>
bool start(const NormForward& params, cudaStream_t stream) {
  if (!fits<T, kLanes>(params)) return false;
  if (params.rows == 0) return true;
  const NormPlan& plan = params.plan;
  if (plan.way == NormWay::Cluster) {
    const ClusterLaunch launch(plan, 0, params.rows, stream);
    constexpr auto kKernel =
        forward_in_registers<Norm, T, kLanes, kClusterBytes<T>, kBlocksOfCluster>;
    cudaLaunchKernelEx(&launch.config, kKernel, params);
    return true;
  }
  const unsigned int blocks = blocks_of_teams(params.rows, plan);
  auto start_kernel = [&](auto* kernel) {
    kernel<<<blocks, plan.threads, 0, stream>>>(params);
    return true;
  };
  const int64_t kept = params.columns * int64_t{sizeof(T)};
  if (kept > plan.team * int64_t{kBytes}) {
    return start_kernel(forward_in_registers<Norm, T, kLanes, 2 * kBytes, kAnyWarps>);
  }
  if constexpr (kLanes == kLanesOf16Bytes<T>) {
    if (const auto kernel = kernel_of_one_team<Norm, T>(params)) return start_kernel(kernel);
  }
  return plan.team <= kWarp
             ? start_kernel(forward_in_registers<Norm, T, kLanes, kBytes, kAnyPartOfWarp>)
             : start_kernel(forward_in_registers<Norm, T, kLanes, kBytes, kAnyWarps>);
}

}  // namespace

template <typename Norm>
bool start_forward_registers(const NormForward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = params.plan.loads == NormLoads::Narrow
                  ? start<Norm, T, kLanesOf8Bytes<T>>(params, stream)
                  : start<Norm, T, kLanesOf16Bytes<T>>(params, stream);
  });
  return planned;
}

}  // namespace tch_extension::norm
