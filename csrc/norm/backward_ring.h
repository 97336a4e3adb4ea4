// The backward pass of all rows that fit the registers of a block or of a cluster. Blocks are
// persistent and compute many rows. Each thread copies its part of the next rows of x and dy to its
// own places in shared memory (a ring buffer of rows), so that bytes in flight cost no registers
// and no thread waits for another thread's copies. Both sums of a row are exchanged at one barrier.
// The sums for weight and bias stay in registers over all rows. If a row is too long for one block
// and may begin at any address, the blocks of a cluster share it; other long rows are in
// backward_cluster.h.
//
// Rows that may begin at any address are copied from the multiple of 16 bytes below their
// beginning. What a thread needs is then in its own vector and the next one, which another lane of
// its warp copied.
#pragma once

#include "cluster.h"
#include "kernels.h"
#include "ring.h"
#include "shifted.h"

namespace tch_extension::norm {
namespace {

// A block's share of the work: its columns and its rows.
struct Share : Columns {
  int64_t start;  // the first row of the block's first team
  int64_t step;   // rows per iteration of all blocks: their number of teams
  int64_t part;   // the index of the block's part of the sums over rows
};

template <typename T, Team kTeam>
__device__ __forceinline__ Share share_of_block(const NormBackward& params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const int cluster = kTeam == Team::kCluster ? params.plan.cluster : 1;
  const int teams = teams_of_block(params.plan.team);
  Share share;
  static_cast<Columns&>(share) = columns_of_block(params.columns, kLanes, cluster);
  share.part = blockIdx.x / cluster;
  share.start = share.part * teams;
  share.step = static_cast<int64_t>(gridDim.x / cluster) * teams;
  return share;
}

// A shifted row may have up to kMostRest columns (the rest) more than its team of warps has room
// for: one for each lane of the team's last warp. Otherwise 1025 columns would need twice the
// threads of 1024, half of them idle. src/ops/norm/plan.rs has the same number.
constexpr int kBytesOfRest = 128;
template <typename T>
constexpr int kMostRest = kBytesOfRest / sizeof(T) < kWarp ? kBytesOfRest / sizeof(T) : kWarp;

// How many vectors follow those of a group in the ring buffer.
__host__ __device__ constexpr int vectors_after(int team) {
  return team < kWarp ? 1 : 1 + kBytesOfRest / 16;
}

// A block's vectors of its rows of x, or of dy. For shifted rows each group has one vector more,
// and room for the rest.
template <typename T, bool kShifted>
__host__ __device__ constexpr int vectors_of_row(int threads, int team) {
  return kVectorsOfThread<T> * threads +
         (kShifted ? threads / (team < kWarp ? team : kWarp) * vectors_after(team) : 0);
}

// Finds the bytes of the group's part of a row in one of the two arrays, x or dy.
template <typename T>
struct Source {
  const char* from;  // the group's first column in row 0
  int64_t row_bytes;

  __device__ __forceinline__ Source(const void* pointer, int64_t columns, int64_t column)
      : from(reinterpret_cast<const char*>(static_cast<const T*>(pointer) + column)),
        row_bytes(columns * static_cast<int64_t>(sizeof(T))) {}
  __device__ __forceinline__ const char* row(int64_t index) const {
    return from + index * row_bytes;
  }
  // The distance of the group's part from the multiple of 16 bytes below it. Only the lowest bits
  // matter.
  __device__ __forceinline__ int shift(int64_t index) const {
    const auto low = static_cast<unsigned int>(reinterpret_cast<uintptr_t>(from));
    return static_cast<int>(
        (low + static_cast<unsigned int>(index) * static_cast<unsigned int>(row_bytes)) & 15);
  }
};

// kParameters: whether gradients of weight or bias are wanted. kShifted: rows may begin at any
// address.
template <typename Norm, typename T, bool kShifted, Team kTeam, bool kParameters>
__global__ void __launch_bounds__(kMostThreads, 1) backward_ring(NormBackward params) {
  using C = Compute<T>;
  // Shifted values of 4 bytes or more are read from the ring buffer one by one. Adjacent threads
  // read adjacent values, so that there are no bank conflicts and nothing has to be shifted.
  constexpr bool kSingles = kShifted && sizeof(T) >= 4;
  constexpr int kLanes = kSingles ? 1 : kLanesOf16Bytes<T>, kBytes = 16;
  constexpr int kCopies = kVectorsOfThread<T>, kVectors = kBackwardValues<T> / kLanes;
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ Pair<C> buffer[kPairsOfSums<kTeam>];
  let_the_next_kernel_start();
  // No block may write into the shared memory of a block that has not started.
  if constexpr (kTeam == Team::kCluster) cluster_barrier();
  int phase = 0;
  const int team = params.plan.team, stages = params.plan.stages;
  const int thread = thread_of_team(team);
  Share share = share_of_block<T, kTeam>(params);
  // The share does not include the rest from here on.
  constexpr bool kMayHaveRest = kTeam == Team::kBlockWithRest;
  int rest = 0;
  if constexpr (kMayHaveRest) {
    rest = max(share.columns - team * kBackwardValues<T>, 0);
    share.columns -= rest;
    share.vectors = min(share.vectors, team * kCopies);
  }
  const Group group(team, share.vectors);
  const bool is_last_warp = kMayHaveRest && thread >= team - kWarp;
  const bool has_rest = is_last_warp && group.lane < rest;
  const int first = kSingles ? group.first * kLanesOf16Bytes<T> : group.first;
  auto index = [&](int v) {
    return kShifted ? first + v * group.width + group.lane : v * team + thread;
  };
  // How many vectors of the row the thread has, and how many columns each of them has.
  const int mine_of_row = kShifted ? group.vectors * (kVectors / kCopies) : kVectors;
  const int step_of_thread = kShifted ? group.width : team;
  const int left_of_row = (kSingles ? share.columns : share.vectors) - index(0);
  const int there = (left_of_row + step_of_thread - 1) >> (__ffs(step_of_thread) - 1);
  const int count = kShifted && mine_of_row < there ? mine_of_row : there;
  auto is_there = [&](int v) { return v < count; };
  auto columns_there = [&](int v) { return is_there(v) ? share.columns - index(v) * kLanes : 0; };

  // A thread's places in the ring buffer: for each row its vectors of x, then its vectors of dy.
  const int next_vector = (kShifted ? group.width : blockDim.x) * kBytes;
  const int next_array = vectors_of_row<T, kShifted>(blockDim.x, team) * kBytes;
  const int next_row = 2 * next_array, end_of_ring = stages * next_row;
  unsigned char* mine = ring + threadIdx.x * kBytes;
  if constexpr (kShifted) {
    const int groups_before = threadIdx.x / group.width;
    mine = ring +
           (groups_before * (kCopies * group.width + vectors_after(team)) + group.lane) * kBytes;
  }

  const int64_t first_row = share.start + team_of_block(team);
  const int64_t stride = share.step * params.columns;
  const int64_t begin = first_row * params.columns + share.column + thread * kLanes;
  const T* x_ahead = static_cast<const T*>(params.input) + begin;
  const T* grad_ahead = static_cast<const T*>(params.grad_output) + begin;
  // The bytes of the row from the group's first column on. They are zero or fewer for a group
  // without columns, whose address must be valid all the same.
  const int group_bytes =
      (share.columns + rest) * static_cast<int>(sizeof(T)) - group.first * kBytes;
  const int after =
      is_last_warp ? 1 + (rest * static_cast<int>(sizeof(T)) + kBytes - 1) / kBytes : 1;
  const int64_t group_column =
      group_bytes > 0 ? share.column + group.first * kLanesOf16Bytes<T> : 0;
  const Source<T> x_source(params.input, params.columns, group_column);
  const Source<T> grad_source(params.grad_output, params.columns, group_column);
  auto copy_shifted = [&](const Source<T>& source, int64_t row_ahead, int at) {
    const bool is_row = row_ahead < params.rows;
    const int64_t row = is_row ? row_ahead : 0;
    const int shift = source.shift(row);
    const char* base = source.row(row) - shift;
    const int bytes = is_row ? shift + group_bytes : 0;
    auto copy = [&](int v, int lane) {
      const int offset = (v * group.width + lane) * kBytes;
      const int left = bytes - offset;
      const int there = left < 0 ? 0 : left < kBytes ? left : kBytes;
      start_copy(mine + at + v * next_vector + (lane - group.lane) * kBytes,
                 there > 0 ? base + offset : base, there);
    };
#pragma unroll
    for (int v = 0; v < kCopies; ++v) {
      if (v < group.vectors) copy(v, group.lane);
    }
    // The vector after the group's last, and the rest.
    if (group.lane < after) copy(group.vectors, group.lane);
  };
  auto copy_row = [&](int64_t row_ahead, int at) {
    if constexpr (kShifted) {
      // After this barrier, the other lanes have read the row that is overwritten.
      __syncwarp();
      copy_shifted(x_source, row_ahead, at);
      copy_shifted(grad_source, row_ahead, at + next_array);
    } else {
      const bool is_row = row_ahead < params.rows;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        // Missing columns and rows are filled with zeros, which add nothing to any sum.
        const bool there = is_row && is_there(v);
        const int offset = v * team * kLanes;
        start_copy(mine + at + v * next_vector, there ? x_ahead + offset : params.input,
                   there ? kBytes : 0);
        start_copy(mine + at + next_array + v * next_vector,
                   there ? grad_ahead + offset : params.grad_output, there ? kBytes : 0);
      }
      x_ahead += stride;
      grad_ahead += stride;
    }
    end_of_copies_of_a_row();
  };
  auto read = [&](int v, int at, int shift) {
    if constexpr (kSingles) {
      const int place = at + shift + (v * group.width + group.lane) * static_cast<int>(sizeof(T));
      return Values<T, 1>{{*reinterpret_cast<const T*>(mine - group.lane * kBytes + place)}};
    } else {
      const unsigned char* place = mine + at + v * next_vector;
      const Words words = load_words(place);
      return unpack<T>(kShifted ? shifted<T>(words, load_words(place + kBytes), shift) : words);
    }
  };
  auto read_rest = [&](int at, int shift) {
    const int place =
        at + shift + group.vectors * next_vector + group.lane * static_cast<int>(sizeof(T));
    return static_cast<C>(*reinterpret_cast<const T*>(mine - group.lane * kBytes + place));
  };
  auto moments_of = [&](int64_t row) {
    return row < params.rows ? kept_moments<Norm, C>(params, row) : Pair<C>{C(0), C(0)};
  };

  for (int stage = 0; stage < stages - 1; ++stage)
    copy_row(first_row + stage * share.step, stage * next_row);
  Pair<C> next_moments = moments_of(first_row);
  const Parameter<T> shifted_weight(params.weight, params.columns);
  Values<T, kLanes> weight[kVectors];
  C weight_sums[kVectors][kLanes], bias_sums[kVectors][kLanes];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      weight[v].lane[lane] = weight_sums[v][lane] = bias_sums[v][lane] = C(0);
    }
    if (is_there(v)) {
      const int64_t column = share.column + int64_t{index(v)} * kLanes;
      if constexpr (kShifted && !kSingles) {
        weight[v] = shifted_weight.values(shifted_weight.load(column), C(1));
      } else {
        weight[v] = load_or<T, kLanes>(params.weight, column, C(1));
      }
    }
  }

  C rest_weight(1), rest_weight_sum(0), rest_bias_sum(0);
  if (has_rest && params.weight != nullptr) {
    rest_weight = static_cast<C>(static_cast<const T*>(params.weight)[share.columns + group.lane]);
  }

  const C inverse = C(1) / static_cast<C>(params.columns);
  int at = 0;
  // All threads of a cluster do the same number of iterations, because they meet in sum_of_team.
  for (int64_t row = first_row; row - team_of_block(team) < params.rows; row += share.step) {
    const Pair<C> moments = next_moments;
    next_moments = moments_of(row + share.step);
    // The copy replaces the previous row, which has been read. Starting it earlier, right after
    // that row was read, is no faster.
    copy_row(row + (stages - 1) * share.step, at == 0 ? end_of_ring - next_row : at - next_row);
    wait_for_all_but(stages - 1);
    if constexpr (kShifted) __syncwarp();
    const int x_shift = kShifted ? x_source.shift(row) : 0,
              grad_shift = kShifted ? grad_source.shift(row) : 0;

    // x̂, and the gradient times the weight.
    Values<T, kLanes> normal[kVectors], grad[kVectors];
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kShifted && v >= mine_of_row) break;
      normal[v] = read(v, at, x_shift);
      grad[v] = read(v, at + next_array, grad_shift);
      // x̂ must be zero where there are no columns, too: a huge mean would make it infinite.
      const C rstd = is_there(v) ? moments.second : C(0);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        normal[v].lane[lane] = normal_of<Norm>(normal[v].lane[lane], moments.first, rstd);
      }
      if (kShifted && !kSingles && columns_there(v) < kLanes) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          if (lane >= columns_there(v)) normal[v].lane[lane] = C(0);
        }
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if constexpr (kParameters) {
          weight_sums[v][lane] += grad[v].lane[lane] * normal[v].lane[lane];
          bias_sums[v][lane] += grad[v].lane[lane];
        }
        grad[v].lane[lane] *= weight[v].lane[lane];
        sum.first += grad[v].lane[lane];
        sum.second += grad[v].lane[lane] * normal[v].lane[lane];
      }
    }
    C rest_normal(0), rest_grad(0);
    if (has_rest) {
      rest_normal = normal_of<Norm>(read_rest(at, x_shift), moments.first, moments.second);
      rest_grad = read_rest(at + next_array, grad_shift);
      rest_weight_sum += rest_grad * rest_normal;
      rest_bias_sum += rest_grad;
      rest_grad *= rest_weight;
      sum.first += rest_grad;
      sum.second += rest_grad * rest_normal;
    }
    at = at + next_row == end_of_ring ? 0 : at + next_row;
    sum = sum_of_team<kTeam>(sum, params.plan, team, buffer, phase);
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
    const bool is_asked_for = params.grad_input != nullptr && row < params.rows;
    [[maybe_unused]] Words gradients[kVectors];
    T* dx = static_cast<T*>(params.grad_input) +
            (is_asked_for ? row * params.columns + share.column : 0);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (kShifted && v >= mine_of_row) break;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        grad[v].lane[lane] = input_gradient<Norm>(moments.second, grad[v].lane[lane], mean_grad,
                                                  normal[v].lane[lane], mean_product);
      }
      if constexpr (kShifted && !kSingles) {
        gradients[v] = pack<T>(grad[v]);
      } else if (is_asked_for && is_there(v)) {
        store_values<T, kLanes>(dx, static_cast<int64_t>(index(v)) * kLanes, grad[v]);
      }
    }
    if (has_rest && is_asked_for) {
      dx[share.columns + group.lane] = static_cast<T>(
          input_gradient<Norm>(moments.second, rest_grad, mean_grad, rest_normal, mean_product));
    }
    if constexpr (kShifted && !kSingles) {
      if (params.grad_input != nullptr) {
        store_shifted<T>(dx, is_asked_for ? share.columns : 0, group, gradients);
      }
    }
  }

  if constexpr (kParameters) {
    wait_for_all_but(0);
    if constexpr (kShifted) __syncthreads();
    auto* sums = reinterpret_cast<C*>(ring);
    const int64_t from = share.part * params.columns + share.column;
    auto write = [&](auto& of_thread, void* parts) {
      if (parts == nullptr) return;
      auto place = [&](int v) { return is_there(v) ? index(v) : INT32_MAX; };
      write_block_part<kShifted && !kSingles>(of_thread, static_cast<C*>(parts) + from,
                                              share.columns, team, sums, place);
    };
    write(weight_sums, params.weight_parts);
    write(bias_sums, params.bias_parts);
    auto write_rest = [&](C of_thread, void* parts) {
      if (rest == 0 || parts == nullptr) return;
      __syncthreads();
      if (has_rest) sums[team_of_block(team) * kWarp + group.lane] = of_thread;
      __syncthreads();
      if (static_cast<int>(threadIdx.x) >= rest) return;
      C total(0);
      for (int index = 0; index < teams_of_block(team); ++index)
        total += sums[index * kWarp + threadIdx.x];
      static_cast<C*>(parts)[from + share.columns + threadIdx.x] = total;
    };
    if constexpr (kMayHaveRest) {
      write_rest(rest_weight_sum, params.weight_parts);
      write_rest(rest_bias_sum, params.bias_parts);
    }
  }
}

template <typename T>
bool fits(const NormBackward& params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const NormPlan& plan = params.plan;
  const bool is_shifted = plan.loads == NormLoads::Shifted;
  if (!fits_a_block(plan) || (!is_shifted && !aligned<T, kLanes>(params))) return false;
  if (plan.stages < 2 || plan.stages > 3 || plan.cluster > kMostInCluster) return false;
  if (plan.cluster > 1 && plan.team != plan.threads) return false;
  const int64_t all = (params.columns + kLanes - 1) / kLanes;
  const int64_t each = (all + plan.cluster - 1) / plan.cluster;
  if (each * kLanes <= int64_t{plan.team} * kBackwardValues<T>) return true;
  return is_shifted && plan.team > kWarp && plan.cluster == 1 &&
         params.columns <= int64_t{plan.team} * kBackwardValues<T> + kMostRest<T>;
}

template <typename T>
int bytes_of_rows(const NormPlan& plan) {
  const int vectors = plan.loads == NormLoads::Shifted
                          ? vectors_of_row<T, true>(plan.threads, plan.team)
                          : vectors_of_row<T, false>(plan.threads, plan.team);
  return plan.stages * 2 * 16 * vectors;
}

template <typename Norm, typename T, bool kShifted, Team kTeam, bool kParameters>
void start_kernel(const NormBackward& params, cudaStream_t stream) {
  constexpr auto kKernel = backward_ring<Norm, T, kShifted, kTeam, kParameters>;
  const int bytes = bytes_of_rows<T>(params.plan);
  // The caller checks for errors after the launch.
  if (allow_shared_memory<kKernel>(bytes) != cudaSuccess) return;
  const ClusterLaunch launch(params.plan, bytes, params.parts, stream);
  cudaLaunchKernelEx(&launch.config, kKernel, params);
}

template <typename Norm, typename T, bool kShifted, bool kParameters>
void start(const NormBackward& params, cudaStream_t stream) {
  if (params.plan.way == NormWay::Cluster) {
    if constexpr (kShifted)
      start_kernel<Norm, T, kShifted, Team::kCluster, kParameters>(params, stream);
  } else if (params.plan.team <= kWarp) {
    start_kernel<Norm, T, kShifted, Team::kWithinWarp, kParameters>(params, stream);
  } else {
    // Rows with a rest have a separate kernel, because it needs more registers. Such rows are rare,
    // so there is no variant of it for the input's gradient alone.
    if constexpr (kShifted) {
      if (params.columns > int64_t{params.plan.team} * kBackwardValues<T>) {
        return start_kernel<Norm, T, kShifted, Team::kBlockWithRest, true>(params, stream);
      }
    }
    start_kernel<Norm, T, kShifted, Team::kBlock, kParameters>(params, stream);
  }
}

}  // namespace

template <typename Norm>
bool start_backward_ring(const NormBackward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = fits<T>(params);
    if (!planned) return;
    if (params.plan.loads == NormLoads::Shifted) {
      has_parts(params) ? start<Norm, T, true, true>(params, stream)
                        : start<Norm, T, true, false>(params, stream);
    } else {
      has_parts(params) ? start<Norm, T, false, true>(params, stream)
                        : start<Norm, T, false, false>(params, stream);
    }
  });
  return planned;
}

}  // namespace tch_extension::norm
