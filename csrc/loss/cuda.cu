// A team of lanes keeps a short row in shared memory. A block reads a longer one twice, the second
// time from the cache if it is still there, unless rows_hopper.cu takes it.
#include <algorithm>

#include "../hopper/async_copy.h"
#include "../hopper/dependent_launch.h"
#include "rows.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::loss {
namespace {

// The vectors of a row that a lane keeps, at most.
constexpr int kMostVectors = 8;

// Sums over so many warps of a block from `first` on; their threads get the result. The whole block
// calls this.
template <typename T>
__device__ __forceinline__ Sums<T> sum_of_warps(Sums<T> sums, bool is_smooth, int first,
                                                int warps) {
  __shared__ Sums<T> of_warp[kMostThreads / kWarp];
  sums.add_over_warp(is_smooth);
  // Nobody may write before all have read what the previous row left.
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) of_warp[threadIdx.x / kWarp] = sums;
  __syncthreads();
  Sums<T> all = Sums<T>::none();
  if (lane < warps) all = of_warp[first + lane];
  all.add_over_warp(is_smooth);
  return all;
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

// The row of a team of lanes, whose number is a power of two or a multiple of a warp's. Each lane
// copies its vectors, at most `each`, to shared memory of its own, so that all of them are on their
// way at a time without a register for any.
template <typename T>
struct TeamRow {
  static constexpr int kLanes = kLanesOf16Bytes<T>;

  // A team without a row has no vectors, and a target that is ignored.
  __device__ __forceinline__ TeamRow(const LossRows& params, int64_t row, int team, int most)
      : is_there(row < params.rows),
        index(is_there ? row : 0),
        target(is_there ? params.targets[index] : params.ignore_index),
        lane(static_cast<int>(threadIdx.x) % team),
        team(team),
        each(is_there ? most : 0),
        part(static_cast<const T*>(params.logits) + index * params.row_stride, params.classes) {}

  __device__ __forceinline__ int64_t class_of(int v) const {
    return part.class_of(lane + v * team);
  }
  __device__ __forceinline__ Vector<T, kLanes>& kept(int v) const {
    extern __shared__ __align__(16) unsigned char memory[];
    return reinterpret_cast<Vector<T, kLanes>*>(memory)[threadIdx.x + v * blockDim.x];
  }

  // Neither the copies nor one another wait for the target. A row that begins within a vector has
  // to wait for what it has of it, and does so last.
  __device__ __forceinline__ void start_copies() const {
    for (int v = each - 1; v >= 0; --v) {
      const int64_t at = class_of(v), left = part.classes - at;
      if (at < 0) {
        kept(v) = part.load_edge(at);
      } else if (left > 0) {
        const int count = left < kLanes ? static_cast<int>(left) : kLanes;
        hopper::copy_16_bytes_async(&kept(v), part.logits + at, count * sizeof(T));
      }
    }
    hopper::commit_copies();
  }

  // The logits; those that are no classes are -inf.
  __device__ __forceinline__ Values<T, kLanes> values(int v, int64_t at) const {
    auto values = unpack<T, kLanes>(kept(v));
    if (at + kLanes > part.classes) {
#pragma unroll
      for (int i = 0; i < kLanes; ++i) {
        if (at + i >= part.classes) values.lane[i] = kLeast<Compute<T>>;
      }
    }
    return values;
  }

  const bool is_there;
  const int64_t index, target;
  const int lane, team, each;
  const Part<T> part;
};

// Computes a row whose copies were started. Returns its loss to one lane of the team, and 0 to the
// others. All threads of a block call this; kWide: a team may be several warps.
template <bool kWide, typename T, bool kPlain>
__device__ __forceinline__ Compute<T> compute_team_row(const TeamRow<T>& mine,
                                                       const Row<T, kPlain>& row,
                                                       Compute<T> factor) {
  using C = Compute<T>;
  constexpr int kLanes = TeamRow<T>::kLanes;
  hopper::wait_for_copies<0>();
  Sums<T> sums = Sums<T>::none();
  C at_target = 0;
  bool has_target = false;
  for (int v = 0; v < mine.each; ++v) {
    const int64_t at = mine.class_of(v);
    if (at >= mine.part.classes) break;
    row.template sum_up<kLanes>(mine.values(v, at), at, sums);
    if (row.target >= at && row.target < at + kLanes) {
      has_target = true;
      at_target = row.capped(static_cast<C>(mine.kept(v).lane[row.target - at]));
    }
  }
  if (kWide && mine.team > kWarp) {
    const int warps = mine.team / kWarp, warp = threadIdx.x / kWarp;
    sums = sum_of_warps(sums, row.is_smooth(), warp - warp % warps, warps);
  } else {
    sums.add_over(mine.team, row.is_smooth());
  }
  C loss = 0;
  if (!mine.is_there) return loss;
  if (row.is_ignored && mine.lane == 0) row.write_no_loss();
  if (!row.is_ignored && has_target) loss = row.write_loss(sums, at_target);
  if (row.gradients == nullptr) return loss;
  const bool is_like_logits = are_alike(row.logits, row.gradients);
  const Gradient<T, kPlain> gradient(row, sums, factor);
  for (int v = 0; v < mine.each; ++v) {
    const int64_t at = mine.class_of(v);
    if (at >= mine.part.classes) break;
    const auto values =
        row.is_ignored ? Values<T, kLanes>{} : gradient(unpack<T, kLanes>(mine.kept(v)), at);
    mine.part.store(row.gradients, at, is_like_logits, values);
  }
  return loss;
}

constexpr int kOfTeams = 256;

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kOfTeams)
    rows_by_teams(const __grid_constant__ LossRows params, int team, int each) {
  const int64_t teams = blockDim.x / team;
  const TeamRow<T> mine(params, blockIdx.x * teams + threadIdx.x / team, team, each);
  mine.start_copies();
  hopper::allow_next_kernel();
  const Compute<T> factor = factor_of<T>(params);
  const Row<T, kPlain> row(params, mine.index, mine.target);
  compute_team_row<false>(mine, row, factor);
}

template <typename T>
__device__ __forceinline__ void write_total(const LossRows& params, Compute<T> total) {
  if (params.wide_total) {
    *static_cast<Compute<T>*>(params.total) = total;
  } else {
    *static_cast<T*>(params.total) = static_cast<T>(total);
  }
}

// All of a small call, by one block with a team for each row: the factor, the rows and their total.
// What it reads is on its way at once, and the rest passes between threads.
template <typename T, bool kPlain>
__global__ void __launch_bounds__(kMostThreads)
    small_loss(const __grid_constant__ LossRows params, int team, int each) {
  using C = Compute<T>;
  const TeamRow<T> mine(params, threadIdx.x / team, team, each);
  mine.start_copies();
  const Row<T, kPlain> row(params, mine.index, mine.target);
  C factor = 1;
  if (params.of_mean) {
    const bool counts = mine.lane == 0 && !row.is_ignored;
    if constexpr (kPlain) {
      factor /= static_cast<C>(__syncthreads_count(counts));
    } else {
      factor /= sum_of_block(counts ? row.weight_of(mine.target) : C(0));
    }
    if (threadIdx.x == 0) *static_cast<C*>(params.factor) = factor;
  } else if (params.factor != nullptr) {
    factor = *static_cast<const C*>(params.factor);
  }
  const C loss = compute_team_row<true>(mine, row, factor);
  if (params.total == nullptr) return;
  const C sum = sum_of_block(loss);
  if (threadIdx.x == 0) write_total<T>(params, sum * factor);
}

// A block computes a row of any length.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    rows_by_blocks(const __grid_constant__ LossRows params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  hopper::allow_next_kernel();
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
    sums = sum_of_warps(sums, row.is_smooth(), 0, blockDim.x / kWarp);
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
  // It may have been started while the rows' kernel runs. All threads wait, so that it does not end
  // before that one.
  hopper::wait_for_previous_kernel();
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

// Whether an array's values are read and written as vectors.
__host__ __device__ __forceinline__ bool is_whole(const LossScaled& array) {
  const auto from = reinterpret_cast<uintptr_t>(array.from);
  return (from | reinterpret_cast<uintptr_t>(array.to)) % 16 == 0;
}

// The work of all threads whose blockIdx.y is the array's index.
template <typename From, typename To>
__device__ __forceinline__ void scale_array(const LossScaled& array, Compute<From> factor) {
  constexpr int kLanes = 16 / (sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  const int64_t by = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t vectors = is_whole(array) ? array.count / kLanes : 0;
  for (int64_t vector = first; vector < vectors; vector += by) {
    const auto values = load_values<From, kLanes>(array.from, vector * kLanes);
    Values<To, kLanes> products;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) products.lane[lane] = values.lane[lane] * factor;
    store_values<To, kLanes>(array.to, vector * kLanes, products);
  }
  for (int64_t at = vectors * kLanes + first; at < array.count; at += by) {
    const auto value = static_cast<Compute<From>>(static_cast<const From*>(array.from)[at]);
    static_cast<To*>(array.to)[at] = static_cast<To>(value * factor);
  }
}

// blockIdx.y is the array. Nothing of it is read if the factor is 1 and the values stay where they
// are.
template <typename T>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ LossScale params) {
  using C = Compute<T>;
  const LossScaled array = params.arrays[blockIdx.y];
  const C factor = params.wide_factor ? *static_cast<const C*>(params.factor)
                                      : static_cast<C>(*static_cast<const T*>(params.factor));
  if (factor == C(1) && array.from == array.to) return;
  if (array.wide_from) return scale_array<C, C>(array, factor);
  array.wide_to ? scale_array<T, C>(array, factor) : scale_array<T, T>(array, factor);
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
    each = static_cast<int>(std::min<int64_t>(ceil_div(vectors, team), INT32_MAX));
  }

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
  // For the factor each block reads all targets, about eight a thread at a time.
  const int64_t least = params.of_mean ? ceil_div(params.rows, int64_t{8}) : kWarp;
  int threads = kOfTeams;
  while (threads > kWarp && threads / 2 >= least && blocks_of(threads) < kEnough) threads /= 2;
  const auto kernel = is_plain(params) ? rows_by_teams<T, true> : rows_by_teams<T, false>;
  // No GPU has memory for more rows than so many blocks have teams.
  kernel<<<at_most(blocks_of(threads)), threads, teams.bytes(threads), stream>>>(params, teams.team,
                                                                                 teams.each);
}

// Starts one block for the whole call, if that is faster than kernels one after another: without a
// total there is only the rows' kernel.
template <typename T>
bool start_small(const LossRows& params, int64_t vectors, cudaStream_t stream) {
  const int64_t most_bytes = (params.total == nullptr ? 8 : 48) << 10;
  // The least that a GPU gives to a block, and what it gives without asking, both less the kernel's
  // own arrays.
  constexpr int kMostMemory = 62 << 10, kAlwaysAllowed = 40 << 10;
  if (params.rows > kMostThreads) return false;
  if (params.classes > most_bytes / static_cast<int64_t>(sizeof(T)) / params.rows) return false;
  // A lane for each vector, as far as there are so many: in a warp a power of two, or whole warps.
  const int64_t lanes = kMostThreads / params.rows;
  int64_t team = 1;
  while (team < kWarp && team < vectors && 2 * team <= lanes) team *= 2;
  if (team == kWarp) {
    const int64_t each = ceil_div(vectors, lanes / kWarp * kWarp);
    team = ceil_div(ceil_div(vectors, each), int64_t{kWarp}) * kWarp;
  }
  const int64_t each = ceil_div(vectors, team);
  const int64_t threads = ceil_div(params.rows * team, int64_t{kWarp}) * kWarp;
  const int64_t bytes = threads * each * 16;
  if (bytes > kMostMemory) return false;
  const auto kernel = is_plain(params) ? small_loss<T, true> : small_loss<T, false>;
  if (bytes > kAlwaysAllowed &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostMemory) !=
          cudaSuccess) {
    // Another way is tried: clear this error before the next launch check.
    (void)cudaGetLastError();
    return false;
  }
  kernel<<<1, static_cast<unsigned int>(threads), static_cast<size_t>(bytes), stream>>>(
      params, static_cast<int>(team), static_cast<int>(each));
  return true;
}

// Computes the factor of a mean, if it is asked for, and the total, if it is not null. `follows`:
// the kernel before is that of the rows, which allows this one to start before it ends.
template <typename T>
void start_total(const LossRows& rows, bool of_mean, void* total, bool follows,
                 cudaStream_t stream) {
  const LossTotal params{rows.rows,    rows.classes, rows.ignore_index, rows.kind,   of_mean,
                         rows.targets, rows.weight,  rows.losses,       rows.factor, total};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads_for(rows.rows));
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  static hopper::DependentLaunches launches;
  const auto any_kind = reinterpret_cast<const void*>(total_kernel<float>);
  config.numAttrs = follows && launches.are_possible(any_kind) ? 1 : 0;
  // An error stays for the check of the launch.
  (void)cudaLaunchKernelEx(&config, rows.wide_total ? total_kernel<Compute<T>> : total_kernel<T>,
                           params);
}

template <typename T>
void start_rows(const LossRows& params, cudaStream_t stream) {
  // Each block of more rows would take too long to compute the factor.
  constexpr int64_t kFewRows = 1024;
  // About two vectors for each lane, and more only in rows that are too long for a warp.
  const Teams teams(params, kLanesOf16Bytes<T>, 2);
  if (start_small<T>(params, teams.vectors, stream)) return;
  void* const total = params.total;
  // The rows' kernel computes the factor with gradients and without them, so that the bits are the
  // same. Otherwise the total's kernel does, before the rows if their gradients need it.
  const bool by_rows = params.rows <= kFewRows;
  const bool in_total = params.of_mean && !by_rows && params.gradients == nullptr;
  const bool is_ahead = params.of_mean && !by_rows && !in_total;
  if (is_ahead) start_total<T>(params, true, nullptr, false, stream);
  // What follows clears errors of launches that may fail.
  if (cudaPeekAtLastError() != cudaSuccess) return;
  LossRows of_rows = params;
  if (is_ahead || in_total) of_rows.of_mean = 0;
  if (in_total) of_rows.factor = nullptr;
  if (teams.is_possible()) {
    start_teams<T>(of_rows, teams, stream);
  } else if (!start_rows_in_shared_memory(of_rows, stream)) {
    const int64_t vectors = ceil_div(params.classes, int64_t{kLanesOf16Bytes<T>});
    rows_by_blocks<T><<<at_most(params.rows), threads_for(vectors), 0, stream>>>(of_rows);
  }
  if (total != nullptr) start_total<T>(params, in_total, total, true, stream);
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
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    // Several vectors a thread: if the factor is 1, fewer blocks have to come and go.
    constexpr int64_t kOfThread = 8;
    int64_t items = 0;
    for (const LossScaled& array : params->arrays) {
      const int64_t steps = array.count / (is_whole(array) ? kLanesOf16Bytes<T> : 1);
      if (array.count > 0) items = std::max(items, steps / kOfThread + 1);
    }
    if (items == 0) return;
    constexpr int kArrays = sizeof(params->arrays) / sizeof(LossScaled);
    scale_kernel<T><<<dim3(blocks_for(items), kArrays), kThreads, 0, stream>>>(*params);
  });
  return launch_status("loss_scale");
}
