// The forward pass. A team keeps its row in registers, so that memory is read once: 2·M·N values
// are moved, and the parameters. The number of bytes in flight decides the speed, and the registers
// limit it: each thread keeps 64 bytes, and as many small blocks run as fit. Rows that do not fit a
// block's registers are read again for each pass, mostly from the L2 cache.

#include "forward.h"

namespace tch_extension {
namespace {

// A parameter's values at a column. kThere: the parameter is known to be present.
template <typename T, int kLanes, bool kThere>
__device__ __forceinline__ Values<T, kLanes> load_parameter(const void* pointer, int64_t at,
                                                            Compute<T> otherwise) {
  if constexpr (kThere) return unpack<T, kLanes>(load_vector<T, kLanes>(pointer, at));
  return load_or<T, kLanes>(pointer, at, otherwise);
}

// Writes the outputs of one vector. `centred` is x - mean.
template <typename T, int kLanes, bool kAffine>
__device__ __forceinline__ void write_normal(const LayerNormForward& params, int64_t row_at,
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
template <typename T, int kLanes, int kKept, int kTeam, bool kFull = false,
          bool kAffine = (kTeam > 0)>
__global__ void __launch_bounds__(kThreadsOfBlock<kTeam>, (kBlocksAtATime<T, kLanes, kKept, kTeam>))
    layer_norm_forward_in_registers(LayerNormForward params) {
  using C = Compute<T>;
  constexpr int kVectors = kKept / sizeof(T) / kLanes;
  constexpr Team kKind = kTeamOf<kTeam>;
  constexpr int kWarps = kFull ? kTeam / kWarp : 1;
  __shared__ Pair<C> buffer[kFull ? 1 : kPairsOfSums<kKind>];
  __shared__ __align__(16) C sums_of_warps[kWarps];
  __shared__ __align__(16) Pair<C> pairs_of_warps[kWarps];
  // No block may write into the shared memory of a block that has not started.
  if constexpr (kKind == Team::kCluster) arrive_at_cluster_barrier();
  int turn = 0;
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
  auto is_there = [&](int v) { return kFull || v * team + thread < vectors; };

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
      if (v == 0 && !kFull) first = x[0].lane[0];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        sums[lane % kSums] += x[v].lane[lane] * scales.scale;
    }
  }
  C sum(0);
#pragma unroll
  for (const C& one : sums) sum += one;
  if constexpr (kKind == Team::kCluster) wait_at_cluster_barrier();
  if constexpr (kFull) {
    sum = block_sum<kTeam>(sum, sums_of_warps);
  } else {
    const Pair<C> sum_of_row = sum_and_first<kKind>(sum, first, params.plan, team, buffer, turn);
    sum = sum_of_row.first;
    first = sum_of_row.second;
  }
  const C mean = pivot<C>(sum * scales.unscale, first);

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
    centred = sum_of_team<kKind>(centred, params.plan, team, buffer, turn);
  }
  const auto moments = moments_from<C>(mean, centred, scales, params.eps);

#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (is_there(v)) {
      const int64_t at_column = column + (v * team + thread) * kLanes;
      write_normal<T, kLanes, kAffine>(params, row_at, at_column, x[v], moments);
    }
  }
  if (thread == 0 && column == 0 && row < params.rows) keep_moments(params, row, moments);
}

// For rows that do not fit a block's registers: the block is one team, and reads its row again for
// each pass.
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

// Whether kLanes values can be loaded at a time. Null counts as aligned.
template <typename T, int kLanes>
bool aligned(const LayerNormForward& params) {
  return params.columns % kLanes == 0 && is_aligned<T, kLanes>(params.input) &&
         is_aligned<T, kLanes>(params.weight) && is_aligned<T, kLanes>(params.bias) &&
         is_aligned<T, kLanes>(params.output);
}

template <typename T, int kLanes>
bool fits(const LayerNormForward& params) {
  const LayerNormPlan& plan = params.plan;
  if (params.kind != params.parameter_kind || !fits_a_block(plan)) return false;
  if (!aligned<T, kLanes>(params)) return false;
  if (plan.cluster > 1) return fits_a_cluster<T, kClusterBytes<T>>(params);
  if (!plan.in_registers) return plan.team == plan.threads;
  const int64_t kept = plan.team <= kWarp ? kBytes : 2 * kBytes;
  return params.columns * int64_t{sizeof(T)} <= plan.team * kept &&
         params.rows <= int64_t{INT32_MAX} * (plan.threads / plan.team);
}

// The kernel for exactly the plan's size of team, with a weight and a bias. It is null if there is
// none; there is none for doubles.
template <typename T>
auto kernel_of_one_team(const LayerNormForward& params) -> void (*)(LayerNormForward) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const LayerNormPlan& plan = params.plan;
  const bool is_affine = params.weight != nullptr && params.bias != nullptr;
  if (!is_affine || plan.threads != (plan.team < 2 * kWarp ? 2 * kWarp : plan.team)) return nullptr;
  const int64_t bytes = params.columns * int64_t{sizeof(T)};
  const bool is_half = bytes <= plan.team * int64_t{kBytes / 2};
  const bool is_full = bytes == plan.team * int64_t{kBytes};
  if constexpr (sizeof(T) < sizeof(double)) {
    switch (plan.team) {
      case 8:
        return layer_norm_forward_in_registers<T, kLanes, kBytes, 8>;
      case 16:
        return is_half ? layer_norm_forward_in_registers<T, kLanes, kBytes / 2, 16>
                       : layer_norm_forward_in_registers<T, kLanes, kBytes, 16>;
      case 32:
        return layer_norm_forward_in_registers<T, kLanes, kBytes, 32>;
      case 64:
        return layer_norm_forward_in_registers<T, kLanes, kBytes, 64>;
      case 128:
        return layer_norm_forward_in_registers<T, kLanes, kBytes, 128>;
      case 256:
        return is_full ? layer_norm_forward_in_registers<T, kLanes, kBytes, 256, true>
                       : layer_norm_forward_in_registers<T, kLanes, kBytes, 256>;
      case 512:
        return is_full ? layer_norm_forward_in_registers<T, kLanes, kBytes, 512, true>
                       : layer_norm_forward_in_registers<T, kLanes, kBytes, 512>;
    }
  }
  return nullptr;
}

template <typename T>
void start_in_registers(const LayerNormForward& params, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const LayerNormPlan& plan = params.plan;
  if (plan.cluster > 1) {
    const ClusterLaunch launch(plan, 0, params.rows, stream);
    constexpr auto kKernel =
        layer_norm_forward_in_registers<T, kLanes, kClusterBytes<T>, kBlocksOfCluster>;
    cudaLaunchKernelEx(&launch.config, kKernel, params);
    return;
  }
  const unsigned int blocks = blocks_of_teams(params.rows, plan);
  auto start_kernel = [&](auto* kernel) { kernel<<<blocks, plan.threads, 0, stream>>>(params); };
  const int64_t kept = params.columns * int64_t{sizeof(T)};
  if (kept > plan.team * int64_t{kBytes}) {
    return start_kernel(layer_norm_forward_in_registers<T, kLanes, 2 * kBytes, kAnyWarps>);
  }
  if (const auto kernel = kernel_of_one_team<T>(params)) return start_kernel(kernel);
  plan.team <= kWarp
      ? start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, kAnyPartOfWarp>)
      : start_kernel(layer_norm_forward_in_registers<T, kLanes, kBytes, kAnyWarps>);
}

template <typename T, int kLanes>
bool start(const LayerNormForward& params, cudaStream_t stream) {
  if (!fits<T, kLanes>(params)) return false;
  if (params.rows == 0) return true;
  if (params.plan.in_registers) {
    if constexpr (kLanes != kLanesOf16Bytes<T>) return false;
    start_in_registers<T>(params, stream);
    return true;
  }
  const unsigned int blocks = at_most(params.rows, INT32_MAX);
  layer_norm_forward_in_passes<T, kLanes><<<blocks, params.plan.threads, 0, stream>>>(params);
  return true;
}

}  // namespace

const char* start_layer_norm_forward(const LayerNormForward& params, cudaStream_t stream) {
  bool planned = false;
  if (params.plan.shifted) {
    planned = start_layer_norm_forward_shifted(params, stream);
  } else {
    for_kind(params.kind, [&](auto type) {
      using T = typename decltype(type)::type;
      planned = params.plan.lanes == kLanesOf16Bytes<T>
                    ? start<T, kLanesOf16Bytes<T>>(params, stream)
                : params.plan.lanes == 1 ? start<T, 1>(params, stream)
                                         : false;
    });
  }
  return planned ? nullptr : "internal error: the plan does not fit the arrays";
}

}  // namespace tch_extension
