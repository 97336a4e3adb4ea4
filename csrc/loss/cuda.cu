// A team of lanes keeps a short row in shared memory. A block reads a longer one twice, the second
// time from the cache if it is still there, unless rows_hopper.cu takes it.
#include <algorithm>

#include "../hopper/async_copy.h"
#include "rows.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::loss {
namespace {

constexpr int kMostThreads = 1024;
// The vectors of a row that a lane keeps, at most.
constexpr int kMostVectors = 8;

// Sums over a block; all threads get the result.
template <typename T>
__device__ __forceinline__ Sums<T> sum_of_block(Sums<T> sums, bool is_smooth) {
  __shared__ Sums<T> of_warp[kMostThreads / kWarp];
  sums.add_over_warp(is_smooth);
  // Nobody may write before all have read what the previous row left.
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = sums;
  __syncthreads();
  Sums<T> all = Sums<T>::none();
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  if (lane < warps) all = of_warp[lane];
  all.add_over_warp(is_smooth);
  return all;
}

template <typename C>
__device__ __forceinline__ C sum_of_warp(C sum) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// One block adds the values of all rows, always in the same order. Several loads are on their way
// at a time, because a single block waits for most of its time.
template <typename C, typename Value>
__device__ __forceinline__ C sum_of_rows(int64_t rows, Value value) {
  constexpr int kAtOnce = 8;
  __shared__ C of_warp[kMostThreads / kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  const int64_t by = blockDim.x;
  C parts[kAtOnce] = {};
  int64_t row = threadIdx.x;
  for (; row + (kAtOnce - 1) * by < rows; row += kAtOnce * by) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) parts[i] += value(row + i * by);
  }
  for (; row < rows; row += by) parts[0] += value(row);
  C sum = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sum += parts[i];
  sum = sum_of_warp(sum);
  // Nobody may write before all have read an earlier sum.
  __syncthreads();
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  return sum_of_warp(lane < warps ? of_warp[lane] : C(0));
}

// Σ w[t] over rows that are not ignored, by each block that calls it.
template <typename C>
__device__ __forceinline__ C weight_of_targets(int64_t rows, int64_t classes, int64_t ignore_index,
                                               const int64_t* targets, const void* weights) {
  const C* weight = static_cast<const C*>(weights);
  return sum_of_rows<C>(rows, [&](int64_t row) {
    const int64_t target = targets[row];
    if (target == ignore_index) return C(0);
    // The kernel of the rows says so if it is no class; here it must not be read.
    return weight == nullptr ? C(1) : target < 0 || target >= classes ? C(0) : weight[target];
  });
}

// The vectors of a row, counted from the aligned 16 bytes in which it begins. Those at its ends may
// belong to other rows, too, and are read and written value by value.
template <typename T>
struct Part {
  static constexpr int kLanes = kLanesOf16Bytes<T>;

  __device__ __forceinline__ Part(const T* logits, int64_t classes)
      : logits(logits),
        classes(classes),
        before(static_cast<int>(reinterpret_cast<uintptr_t>(logits) / sizeof(T) % kLanes)),
        count((before + classes + kLanes - 1) / kLanes) {}

  // The class of a vector's first value, which may be negative.
  __device__ __forceinline__ int64_t class_of(int64_t vector) const {
    return vector * kLanes - before;
  }
  __device__ __forceinline__ bool is_own(int64_t at) const {
    return at >= 0 && at + kLanes <= classes;
  }

  // Values that are no classes are -inf.
  __device__ __forceinline__ Vector<T, kLanes> load(int64_t at) const {
    return is_own(at) ? load_vector<T, kLanes>(logits, at) : load_edge(at);
  }
  __device__ __forceinline__ Vector<T, kLanes> load_edge(int64_t at) const {
    Vector<T, kLanes> vector;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const bool is_class = at + lane >= 0 && at + lane < classes;
      vector.lane[lane] = is_class ? logits[at + lane] : static_cast<T>(kLeast<Compute<T>>);
    }
    return vector;
  }

  // `is_like_logits`: the gradients begin at the same place among 16 bytes.
  __device__ __forceinline__ void store(T* gradients, int64_t at, bool is_like_logits,
                                        const Values<T, kLanes>& values) const {
    if (is_like_logits && is_own(at)) return store_values<T, kLanes>(gradients, at, values);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (at + lane >= 0 && at + lane < classes)
        gradients[at + lane] = static_cast<T>(values.lane[lane]);
    }
  }

  const T* const logits;
  const int64_t classes;
  const int before;
  const int64_t count;
};

__device__ __forceinline__ bool are_alike(const void* logits, const void* gradients) {
  return (reinterpret_cast<uintptr_t>(logits) - reinterpret_cast<uintptr_t>(gradients)) % 16 == 0;
}

// Computes the rows `first`, `first + step`, … of a team of lanes of a warp, a power of two, of
// which this one is `lane`. Each thread copies `each` vectors of a row, at most, to shared memory
// of its own, so that all of them are on their way at a time without a register for any. A warp
// calls this as a whole, with a row for its first team.
template <typename T, bool kPlain>
__device__ __forceinline__ void compute_short_rows(const LossRows& params, Compute<T> factor,
                                                   int64_t first, int64_t step, int lane, int team,
                                                   int each) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  extern __shared__ __align__(16) unsigned char memory[];
  auto* const kept = reinterpret_cast<Vector<T, kLanes>*>(memory) + threadIdx.x;
  const int in_warp = static_cast<int>(threadIdx.x % kWarp) / team;
  const bool is_like_logits = are_alike(params.logits, params.gradients);
  for (int64_t index = first; index - in_warp < params.rows; index += step) {
    const bool is_there = index < params.rows;
    const int64_t own = is_there ? index : 0;
    const Part<T> part(static_cast<const T*>(params.logits) + own * params.row_stride,
                       params.classes);
    // The copies do not wait for the target.
    const int64_t target = is_there ? params.targets[index] : params.ignore_index;
    for (int v = 0; v < each; ++v) {
      const int64_t at = part.class_of(lane + v * team);
      if (part.is_own(at)) {
        hopper::copy_16_bytes_async(kept + v * blockDim.x, part.logits + at, 16);
      } else if (at < params.classes) {
        kept[v * blockDim.x] = part.load_edge(at);
      }
    }
    hopper::commit_copies();
    const Row<T, kPlain> row(params, own, target);
    hopper::wait_for_copies<0>();
    Sums<T> sums = Sums<T>::none();
    C at_target = 0;
    bool has_target = false;
    for (int v = 0; v < each; ++v) {
      const int64_t at = part.class_of(lane + v * team);
      if (at >= params.classes) break;
      const auto values = unpack<T, kLanes>(kept[v * blockDim.x]);
      row.template sum_up<kLanes>(values, at, sums);
      if (target >= at && target < at + kLanes) {
        has_target = true;
        at_target = row.capped(static_cast<C>(kept[v * blockDim.x].lane[target - at]));
      }
    }
    sums.add_over(team, row.is_smooth());
    if (!is_there) continue;
    if (row.is_ignored && lane == 0) row.write_no_loss();
    if (!row.is_ignored && has_target) row.write_loss(sums, at_target);
    if (row.gradients == nullptr) continue;
    const Gradient<T, kPlain> gradient(row, sums, factor);
    for (int v = 0; v < each; ++v) {
      const int64_t at = part.class_of(lane + v * team);
      if (at >= params.classes) break;
      const auto values = row.is_ignored ? Values<T, kLanes>{}
                                         : gradient(unpack<T, kLanes>(kept[v * blockDim.x]), at);
      part.store(row.gradients, at, is_like_logits, values);
    }
  }
}

// The factor: the one that is given or, for a mean, one that each block computes from all targets.
template <typename T>
__device__ __forceinline__ Compute<T> factor_of(const LossRows& params) {
  using C = Compute<T>;
  if (!params.of_mean) {
    return params.factor == nullptr ? C(1) : *static_cast<const C*>(params.factor);
  }
  const C factor = C(1) / weight_of_targets<C>(params.rows, params.classes, params.ignore_index,
                                               params.targets, params.weight);
  if (blockIdx.x == 0 && threadIdx.x == 0) *static_cast<C*>(params.factor) = factor;
  return factor;
}

constexpr int kOfTeams = 256;

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kOfTeams)
    rows_by_teams(const __grid_constant__ LossRows params, int team, int each) {
  const int64_t teams = blockDim.x / team;
  const Compute<T> factor = factor_of<T>(params);
  compute_short_rows<T, kPlain>(params, factor, blockIdx.x * teams + threadIdx.x / team,
                                gridDim.x * teams, threadIdx.x % team, team, each);
}

// All of a small call, by one block: the factor, the rows and their total.
constexpr int kOfSmall = 512;

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kOfSmall)
    small_loss(const __grid_constant__ LossRows params, int team, int each) {
  using C = Compute<T>;
  const C factor = factor_of<T>(params);
  compute_short_rows<T, kPlain>(params, factor, threadIdx.x / team, blockDim.x / team,
                                threadIdx.x % team, team, each);
  if (params.total == nullptr) return;
  // The losses were written by this block.
  __syncthreads();
  const C* losses = static_cast<const C*>(params.losses);
  const C sum = sum_of_rows<C>(params.rows, [&](int64_t row) { return losses[row]; });
  if (threadIdx.x == 0) *static_cast<T*>(params.total) = static_cast<T>(sum * factor);
}

// A block computes a row of any length.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    rows_by_blocks(const __grid_constant__ LossRows params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const Compute<T> factor = factor_of<T>(params);
  const bool is_like_logits = are_alike(params.logits, params.gradients);
  for (int64_t index = blockIdx.x; index < params.rows; index += gridDim.x) {
    const Row<T, false> row(params, index, params.targets[index]);
    const Part<T> part(row.logits, params.classes);
    if (row.is_ignored) {
      if (threadIdx.x == 0) row.write_no_loss();
      for (int64_t at = threadIdx.x; row.gradients != nullptr && at < params.classes;
           at += blockDim.x)
        row.gradients[at] = static_cast<T>(0.0f);
      continue;
    }
    Compute<T> at_target = 0;
    // Before the gradients: they may be written over the logits.
    if (threadIdx.x == 0) at_target = row.logit_of_target();
    Sums<T> sums = Sums<T>::none();
    for (int64_t vector = threadIdx.x; vector < part.count; vector += blockDim.x) {
      const int64_t at = part.class_of(vector);
      row.template sum_up<kLanes>(unpack<T, kLanes>(part.load(at)), at, sums);
    }
    sums = sum_of_block(sums, row.is_smooth());
    if (threadIdx.x == 0) row.write_loss(sums, at_target);
    if (row.gradients == nullptr) continue;
    const Gradient<T, false> gradient(row, sums, factor);
    for (int64_t vector = threadIdx.x; vector < part.count; vector += blockDim.x) {
      const int64_t at = part.class_of(vector);
      part.store(row.gradients, at, is_like_logits, gradient(unpack<T, kLanes>(part.load(at)), at));
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    total_kernel(const __grid_constant__ LossTotal params) {
  using C = Compute<T>;
  const C* losses = static_cast<const C*>(params.losses);
  C factor;
  if (!params.of_mean) {
    factor = params.factor == nullptr ? C(1) : *static_cast<const C*>(params.factor);
  } else {
    factor = C(1) / weight_of_targets<C>(params.rows, params.classes, params.ignore_index,
                                         params.targets, params.weight);
    if (threadIdx.x == 0) *static_cast<C*>(params.factor) = factor;
  }
  if (params.total == nullptr) return;
  const C sum = sum_of_rows<C>(params.rows, [&](int64_t row) { return losses[row]; });
  if (threadIdx.x == 0) *static_cast<T*>(params.total) = static_cast<T>(sum * factor);
}

// Nothing is read if the factor is 1 and the values stay where they are.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ LossScale params) {
  const auto factor = *static_cast<const Compute<T>*>(params.factor);
  if (factor == Compute<T>(1) && params.from == params.to) return;
  const int64_t by = static_cast<int64_t>(gridDim.x) * kThreads * kLanes;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  for (; at < params.count; at += by) {
    auto values = load_values<T, kLanes>(params.from, at);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] *= factor;
    store_values<T, kLanes>(params.to, at, values);
  }
}

unsigned int at_most(int64_t blocks) {
  return static_cast<unsigned int>(blocks < INT32_MAX ? blocks : INT32_MAX);
}

// As many warps as a row has vectors for, up to the largest block.
int threads_for(int64_t vectors) {
  const int64_t warps = (vectors + kWarp - 1) / kWarp;
  const int64_t most = kMostThreads / kWarp;
  return static_cast<int>((warps < 1 ? 1 : warps < most ? warps : most) * kWarp);
}

// How the lanes of a warp divide a row: a team of them, and the vectors of each.
struct Teams {
  int team, each;

  // `most` is how many vectors a lane has at most, `lanes` the number of values of a vector.
  Teams(const LossRows& params, int64_t lanes, int most) : team(1), each(1) {
    const bool is_whole = params.classes % lanes == 0 && params.row_stride % lanes == 0 &&
                          is_aligned_to_16(params.logits);
    // A row that begins anywhere may need a vector more.
    vectors = ceil_div(params.classes, lanes) + !is_whole;
    while (team < kWarp && team * most < vectors) team *= 2;
    divide();
  }

  // Gives a row more lanes, if it has a vector for each.
  void widen() {
    team *= 2;
    divide();
  }
  void divide() { each = static_cast<int>(std::min<int64_t>(ceil_div(vectors, team), INT32_MAX)); }

  bool is_possible() const { return each <= kMostVectors; }
  int bytes(int threads) const { return threads * each * 16; }

  int64_t vectors;
};

template <typename T>
void start_teams(const LossRows& params, const Teams& teams, cudaStream_t stream) {
  // Fewer threads in a block, as long as some of the multiprocessors would have none.
  constexpr int64_t kEnough = 256;
  const auto blocks_of = [&](int threads) {
    return ceil_div(params.rows, int64_t{threads / teams.team});
  };
  int threads = kOfTeams;
  while (threads > kWarp && blocks_of(threads) < kEnough) threads /= 2;
  const auto kernel = is_plain(params) ? rows_by_teams<T, true> : rows_by_teams<T, false>;
  kernel<<<at_most(blocks_of(threads)), threads, teams.bytes(threads), stream>>>(params, teams.team,
                                                                                 teams.each);
}

// Whether one block computes a call faster than three kernels do one after another.
template <typename T>
bool is_small(const LossRows& params) {
  constexpr int64_t kMostBytes = 32 << 10;
  constexpr int64_t kMostRows = 1024;
  return params.rows <= kMostRows &&
         params.rows * params.classes * static_cast<int64_t>(sizeof(T)) <= kMostBytes;
}

template <typename T>
void start_small(const LossRows& params, Teams teams, cudaStream_t stream) {
  while (teams.team < kWarp && teams.team < teams.vectors &&
         2 * teams.team * params.rows <= kOfSmall) {
    teams.widen();
  }
  constexpr int kMostMemory = 48 << 10;  // what a block may have without asking
  const int threads = teams.bytes(kOfSmall) <= kMostMemory ? kOfSmall : kOfSmall / 2;
  const auto kernel = is_plain(params) ? small_loss<T, true> : small_loss<T, false>;
  kernel<<<1, threads, teams.bytes(threads), stream>>>(params, teams.team, teams.each);
}

// Computes the factor of a mean, if it is asked for, and the total, if it is not null.
template <typename T>
void start_total(const LossRows& rows, bool of_mean, void* total, cudaStream_t stream) {
  const LossTotal params{rows.rows,    rows.classes, rows.ignore_index, rows.kind,   of_mean,
                         rows.targets, rows.weight,  rows.losses,       rows.factor, total};
  total_kernel<T><<<1, threads_for(rows.rows), 0, stream>>>(params);
}

template <typename T>
void start_rows(const LossRows& params, cudaStream_t stream) {
  // Each block of more rows would take too long to compute the factor.
  constexpr int64_t kFewRows = 1024;
  // About two vectors for each lane, and more only in rows that are too long for a warp.
  const Teams teams(params, kLanesOf16Bytes<T>, 2);
  const bool short_rows = teams.is_possible();
  if (short_rows && is_small<T>(params)) return start_small<T>(params, teams, stream);
  void* const total = params.total;
  // The rows' kernel computes the factor with gradients and without them, so that the bits are the
  // same. Otherwise the total's kernel does, before the rows if their gradients need it.
  const bool by_rows = short_rows && params.rows <= kFewRows;
  const bool in_total = params.of_mean && !by_rows && params.gradients == nullptr;
  const bool is_ahead = params.of_mean && !by_rows && !in_total;
  if (is_ahead) start_total<T>(params, true, nullptr, stream);
  LossRows of_rows = params;
  if (is_ahead || in_total) of_rows.of_mean = 0;
  if (in_total) of_rows.factor = nullptr;
  if (short_rows) {
    start_teams<T>(of_rows, teams, stream);
  } else if (!start_rows_in_shared_memory(of_rows, stream)) {
    const int64_t vectors = ceil_div(params.classes, int64_t{kLanesOf16Bytes<T>});
    rows_by_blocks<T><<<at_most(params.rows), threads_for(vectors), 0, stream>>>(of_rows);
  }
  if (total != nullptr) start_total<T>(params, in_total, total, stream);
}

}  // namespace
}  // namespace tch_extension::loss

using namespace tch_extension;
using namespace tch_extension::loss;

extern "C" LaunchStatus tch_extension_loss_rows_cuda(const LossRows* params, cudaStream_t stream) {
  if (params->rows > 0) {
    for_kind(params->kind,
             [&](auto type) { start_rows<typename decltype(type)::type>(*params, stream); });
  }
  return launch_status("loss_rows");
}

extern "C" LaunchStatus tch_extension_loss_total_cuda(const LossTotal* params,
                                                      cudaStream_t stream) {
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    total_kernel<T><<<1, threads_for(params->rows), 0, stream>>>(*params);
  });
  return launch_status("loss_total");
}

extern "C" LaunchStatus tch_extension_loss_scale_cuda(const LossScale* params,
                                                      cudaStream_t stream) {
  if (params->count > 0) {
    for_kind(params->kind, [&](auto type) {
      using T = typename decltype(type)::type;
      constexpr int kLanes = kLanesOf16Bytes<T>;
      // Several vectors a thread: if the factor is 1, fewer blocks have to come and go.
      constexpr int64_t kOfThread = 8;
      const bool is_whole = params->count % kLanes == 0 && is_aligned_to_16(params->from) &&
                            is_aligned_to_16(params->to);
      const int64_t items = params->count / (is_whole ? kLanes : 1) / kOfThread + 1;
      const unsigned int blocks = blocks_for(items);
      if (is_whole) {
        scale_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(*params);
      } else {
        scale_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(*params);
      }
    });
  }
  return launch_status("loss_scale");
}
