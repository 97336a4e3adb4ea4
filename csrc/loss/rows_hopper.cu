// Rows that are read once: a row is copied to the shared memory of the blocks of a cluster, each of
// which has a part of it, summed up there, and read there again for the gradient. Several blocks
// share a multiprocessor, so that some copy while others compute. A row may begin at any address:
// its first and last 16 bytes may belong to other rows, too, and are copied value by value.
#include <algorithm>

#include "../hopper/bulk_copy.h"
#include "../hopper/cluster.h"
#include "../hopper/cluster_launch.h"
#include "../hopper/dependent_launch.h"
#include "../hopper/processors.h"
#include "rows.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::loss {
namespace {

constexpr int kMostInCluster = 8;
constexpr int kVectorBytes = 16;

// A row that fits is given to one of as many blocks as fit in a multiprocessor, if there are rows
// for them. They share its threads; longer rows are shared by the blocks of a cluster, each with a
// multiprocessor of its own.
constexpr int kThreadsOfProcessor = 512;
constexpr int kStages = 2;

// Writes the gradient of a row without a loss, from class `begin` on to class `end`; what of this
// is outside of the row is left out.
template <typename Row>
__device__ __forceinline__ void write_zeros(const Row& row, int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > row.params.classes) end = row.params.classes;
  for (int64_t at = begin + threadIdx.x; at < end; at += blockDim.x) row.gradients[at] = 0.0f;
}

// What the warps of a block, or of a cluster, tell one another.
template <typename T, int kWarps>
struct Exchange {
  // Two rows' sums of each warp: some blocks write one while others read the other.
  Sums<T> of_warp[2][kMostInCluster * kWarps];
  uint64_t has_sums[2];
  // The rows that are copied, and their targets.
  uint64_t is_full[kStages];
  int64_t target[kStages];
};

// How many vectors of a row a block has room for. The system takes 1 KiB of each block's memory,
// and a sum over a block and gaps 512 bytes.
template <typename T, int kBlocks>
constexpr int most_vectors() {
  constexpr int kWarps = kThreadsOfProcessor / kBlocks / kWarp;
  constexpr int kOfBlock = (228 << 10) / kBlocks - (1 << 10);
  return (kOfBlock - static_cast<int>(sizeof(Exchange<T, kWarps>)) - 512) / kStages / kVectorBytes;
}

// A block's vectors of a row, which are counted from the one in which the row begins.
template <typename T>
struct Part {
  static constexpr int kLanes = kLanesOf16Bytes<T>;

  // Each block has `each` vectors, as far as there are so many.
  __device__ __forceinline__ Part(const T* row, int64_t classes, int rank, int each) {
    before = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kLanes);
    const int64_t all = (before + classes + kLanes - 1) / kLanes;
    first = int64_t{rank} * each;
    const int64_t left = all - first;
    count = static_cast<int>(left < 0 ? 0 : left < each ? left : each);
    // The vectors that belong to this row alone.
    const bool begins = first == 0 && before != 0;
    const bool ends = count == left && (before + classes) % kLanes != 0;
    own_begin = begins ? 1 : 0;
    own_end = count - (ends ? 1 : 0);
    if (own_end < own_begin) own_end = own_begin;
  }

  // The class of a vector's first value, which may be negative in the row's first vector.
  __device__ __forceinline__ int64_t class_of(int vector) const {
    return (first + vector) * kLanes - before;
  }
  __device__ __forceinline__ bool is_own(int vector) const {
    return vector >= own_begin && vector < own_end;
  }

  int before;  // values of other rows in the row's first vector
  int64_t first;
  int count, own_begin, own_end;
};

// Sums over the threads that share a row. Each row is the next one for all of them.
template <typename T, bool kPlain, int kWarps>
class Team {
 public:
  __device__ __forceinline__ Team(Exchange<T, kWarps>& exchange, int rank, int cluster)
      : exchange(exchange), rank(rank), cluster(cluster) {}

  __device__ __forceinline__ Sums<T> sum(Sums<T> sums, bool is_smooth) {
    sums.add_over_warp(is_smooth);
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, phase = rows % 2;
    Sums<T>* const of_warp = exchange.of_warp[phase];
    if (cluster == 1) {
      if (lane == 0) of_warp[warp] = sums;
      __syncthreads();
    } else {
      // The stores count their bytes at the other block's barrier, so that nobody has to wait until
      // gradients are written, as a barrier of the cluster would.
      const uint32_t barrier = hopper::shared_address(&exchange.has_sums[phase]);
      if (lane < cluster) send(sums, of_warp + rank * kWarps + warp, barrier, lane);
      if (threadIdx.x == 0)
        hopper::mbarrier_arrive_expecting(barrier, cluster * kWarps * kValues * sizeof(C));
      hopper::mbarrier_wait(barrier, rows / 2 % 2);
    }
    ++rows;
    Sums<T> all = Sums<T>::none();
    for (int index = lane; index < cluster * kWarps; index += kWarp)
      all.add(of_warp[index], is_smooth);
    all.add_over_warp(is_smooth);
    return all;
  }

 private:
  using C = Compute<T>;
  static constexpr int kValues = 4;

  __device__ __forceinline__ void send(const Sums<T>& sums, const Sums<T>* place, uint32_t barrier,
                                       int block) const {
    const uint32_t to = hopper::in_block(hopper::shared_address(place), block);
    const uint32_t there = hopper::in_block(barrier, block);
    hopper::store_async(to, there, sums.most);
    hopper::store_async(to + sizeof(C), there, sums.of_exp);
    hopper::store_async(to + 2 * sizeof(C), there, sums.weighted);
    hopper::store_async(to + 3 * sizeof(C), there, sums.weights);
  }

  Exchange<T, kWarps>& exchange;
  const int rank, cluster;
  uint32_t rows = 0;
};

template <typename T, bool kPlain>
__device__ __forceinline__ void write_gradient(const Row<T, kPlain>& row,
                                               const Gradient<T, kPlain>& gradient,
                                               const Vector<T, kLanesOf16Bytes<T>>& logits,
                                               const Part<T>& part, int vector,
                                               bool is_like_logits) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const int64_t at = part.class_of(vector);
  const auto values = gradient(unpack<T, kLanes>(logits), at);
  if (is_like_logits && part.is_own(vector))
    return store_values<T, kLanes>(row.gradients, at, values);
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    if (row.is_class(at + lane)) row.gradients[at + lane] = static_cast<T>(values.lane[lane]);
  }
}

// The first warp copies parts of rows to the shared memory, one while another one is computed.
template <typename T, bool kPlain, int kWarps>
class Copies {
 public:
  static constexpr int kLanes = kLanesOf16Bytes<T>;
  static_assert(2 * kLanes <= kWarp, "a lane for each value of a row's first and last vector");

  __device__ __forceinline__ Copies(unsigned char* memory, Exchange<T, kWarps>& exchange, int rank,
                                    int each)
      : memory(reinterpret_cast<Vector<T, kLanes>*>(memory)),
        exchange(exchange),
        rank(rank),
        each(each) {}

  // Called by all lanes of the first warp. Of a row without a loss only the target is there then.
  __device__ __forceinline__ void start(const LossRows& params, int64_t index, int64_t target) {
    const Row<T, kPlain> row(params, index, target);
    const Part<T> part(row.logits, params.classes, rank, each);
    Vector<T, kLanes>* const to = vectors(started);
    const uint32_t barrier = barrier_of(started);
    const int lane = threadIdx.x % kWarp;
    uint32_t size = 0;
    if (!row.is_ignored) {
      size = (part.own_end - part.own_begin) * kVectorBytes;
      if (lane == 0 && size > 0) {
        hopper::load_bytes(hopper::shared_address(to + part.own_begin),
                           row.logits + part.class_of(part.own_begin), size, barrier);
      }
      const bool is_first = lane < kLanes;
      const int vector = is_first ? 0 : part.own_end;
      const bool has_others =
          is_first ? part.own_begin == 1 : lane < 2 * kLanes && part.own_end < part.count;
      if (has_others) {
        // What other rows have in a vector counts as nothing here.
        const int64_t at = part.class_of(vector) + lane % kLanes;
        to[vector].lane[lane % kLanes] =
            row.is_class(at) ? row.logits[at] : static_cast<T>(kLeast<Compute<T>>);
      }
    }
    // Each lane arrives, because each may have filled in a value.
    if (lane == 0) {
      exchange.target[started % kStages] = target;
      // Bytes that arrived before they are announced count, too.
      hopper::mbarrier_arrive_expecting(barrier, size);
    } else {
      hopper::mbarrier_arrive(barrier);
    }
    ++started;
  }

  // Waits for the next copy, and returns it and its row's target.
  __device__ __forceinline__ const Vector<T, kLanes>* wait(int64_t& target) {
    hopper::mbarrier_wait(barrier_of(waited), waited / kStages % 2);
    target = exchange.target[waited % kStages];
    return vectors(waited++);
  }

 private:
  __device__ __forceinline__ Vector<T, kLanes>* vectors(uint32_t copy) const {
    return memory + copy % kStages * each;
  }
  __device__ __forceinline__ uint32_t barrier_of(uint32_t copy) const {
    return hopper::shared_address(&exchange.is_full[copy % kStages]);
  }

  Vector<T, kLanes>* const memory;
  Exchange<T, kWarps>& exchange;
  const int rank, each;
  uint32_t started = 0, waited = 0;
};

template <typename T, int kWarps>
__device__ __forceinline__ void prepare(Exchange<T, kWarps>& exchange) {
  if (threadIdx.x == 0) {
    for (int index = 0; index < 2; ++index)
      hopper::mbarrier_init<1>(hopper::shared_address(&exchange.has_sums[index]));
    for (int stage = 0; stage < kStages; ++stage)
      hopper::mbarrier_init<kWarp>(hopper::shared_address(&exchange.is_full[stage]));
    hopper::fence_mbarrier_init();
  }
  // No block may write into the shared memory of a block that has not started.
  hopper::cluster_sync();
}

// The loss, by a thread of the block that has the target's logit.
template <typename T, bool kPlain>
__device__ __forceinline__ void write_loss(const Row<T, kPlain>& row, const Part<T>& part,
                                           const Sums<T>& sums, const void* kept) {
  const int64_t at = row.target - part.class_of(0);
  if (threadIdx.x != 0 || at < 0 || at >= int64_t{part.count} * Part<T>::kLanes) return;
  const T logit = static_cast<const T*>(kept)[at];
  row.write_loss(sums, row.capped(static_cast<Compute<T>>(logit)));
}

template <typename T, bool kPlain, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    rows_in_shared_memory(const __grid_constant__ LossRows params, int each) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kLanes = kLanesOf16Bytes<T>, kWarps = kThreads / kWarp;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Exchange<T, kWarps> exchange;
  const int cluster = kBlocks > 1 ? 1 : static_cast<int>(hopper::cluster_size());
  const int rank = kBlocks > 1 ? 0 : static_cast<int>(hopper::cluster_rank());
  hopper::allow_next_kernel();
  prepare(exchange);
  Copies<T, kPlain, kWarps> copies(memory, exchange, rank, each);
  Team<T, kPlain, kWarps> team(exchange, rank, cluster);
  const int64_t step = gridDim.x / cluster, first = blockIdx.x / cluster;
  // The first warp has the target of the row after those that are copied.
  int64_t target_ahead = 0;
  auto start = [&](int64_t index) {
    if (threadIdx.x >= kWarp || index >= params.rows) return;
    copies.start(params, index, target_ahead);
    if (index + step < params.rows) target_ahead = params.targets[index + step];
  };
  if (threadIdx.x < kWarp && first < params.rows) target_ahead = params.targets[first];
  start(first);
  // While the first row is on its way.
  const Compute<T> factor = factor_of<T>(params);
  // Whether a row begins at the same place among 16 bytes in both arrays.
  const bool is_like_logits =
      (reinterpret_cast<uintptr_t>(params.logits) - reinterpret_cast<uintptr_t>(params.gradients)) %
          kVectorBytes ==
      0;
  for (int64_t index = first; index < params.rows; index += step) {
    start(index + step);
    int64_t target;
    const Vector<T, kLanes>* const kept = copies.wait(target);
    const Row<T, kPlain> row(params, index, target);
    const Part<T> part(row.logits, params.classes, rank, each);
    if (row.is_ignored) {
      if (rank == 0 && threadIdx.x == 0) row.write_no_loss();
      if (row.gradients != nullptr) write_zeros(row, part.class_of(0), part.class_of(part.count));
    } else {
      Sums<T> sums = Sums<T>::none();
      for (int vector = threadIdx.x; vector < part.count; vector += kThreads)
        row.template sum_up<kLanes>(unpack<T, kLanes>(kept[vector]), part.class_of(vector), sums);
      sums = team.sum(sums, row.is_smooth());
      write_loss(row, part, sums, kept);
      if (row.gradients != nullptr) {
        const Gradient<T, kPlain> gradient(row, sums, factor);
        for (int vector = threadIdx.x; vector < part.count; vector += kThreads)
          write_gradient(row, gradient, kept[vector], part, vector, is_like_logits);
      }
    }
    // The copy after the next one comes to where this one is, and to where a vector was filled.
    if (threadIdx.x < kWarp) hopper::fence_for_bulk_copies();
    __syncthreads();
  }
  // No block may end before all have sent their sums to it, and it has read them.
  if (cluster > 1) hopper::cluster_sync();
#endif
}

// How the rows are divided among blocks.
struct Plan {
  int cluster, each, threads;
};

struct Launch : hopper::ClusterLaunch {
  Launch(const Plan& plan, int64_t clusters, cudaStream_t stream)
      : ClusterLaunch(plan.threads, kStages * plan.each * kVectorBytes, plan.cluster, clusters,
                      stream) {}
};

using Kernel = void (*)(const LossRows, int);

// How many clusters of a kernel run at a time. The answer is kept until another plan comes: asking
// takes as long as a few launches.
template <Kernel kKernel>
int64_t clusters_at_a_time(const Plan& plan) {
  struct Known {
    int device = -1, cluster = 0, each = 0, clusters = 0;
  };
  thread_local Known known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (known.device == device && known.cluster == plan.cluster && known.each == plan.each)
    return known.clusters;
  int clusters = 0;
  const Launch launch(plan, 1, nullptr);
  if (cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config) != cudaSuccess) {
    // Clear this query's error before the next launch check.
    (void)cudaGetLastError();
    return 0;
  }
  known = {device, plan.cluster, plan.each, clusters};
  return clusters;
}

template <typename T, bool kPlain, int kBlocks>
constexpr Kernel kRows = rows_in_shared_memory<T, kPlain, kThreadsOfProcessor / kBlocks, kBlocks>;

// The multiprocessors, or 0 if they do not run this kernel.
template <typename T, bool kPlain, int kBlocks>
int processors_for() {
  static hopper::Processors processors;
  return processors.of_current({reinterpret_cast<const void*>(kRows<T, kPlain, kBlocks>)},
                               kStages * kVectorBytes * most_vectors<T, kBlocks>(),
                               sizeof(Exchange<T, kThreadsOfProcessor / kBlocks / kWarp>));
}

template <typename T, bool kPlain, int kBlocks>
bool start(const LossRows& params, int64_t vectors, int cluster, cudaStream_t stream) {
  constexpr Kernel kKernel = kRows<T, kPlain, kBlocks>;
  if (processors_for<T, kPlain, kBlocks>() == 0) return false;
  const Plan plan = {cluster, static_cast<int>(ceil_div(vectors, cluster)),
                     kThreadsOfProcessor / kBlocks};
  int64_t clusters = clusters_at_a_time<kKernel>(plan);
  if (clusters == 0) return false;
  if (clusters > params.rows) clusters = params.rows;
  const Launch launch(plan, clusters, stream);
  if (cudaLaunchKernelEx(&launch.config, kKernel, params, plan.each) == cudaSuccess) return true;
  // Another way is tried: clear this launch's error before its check.
  (void)cudaGetLastError();
  return false;
}

template <typename T, bool kPlain>
bool start(const LossRows& params, cudaStream_t stream) {
  // A row may begin and end within a vector.
  const int64_t vectors = params.classes / kLanesOf16Bytes<T> + 2;
  // Fewer blocks, with more threads each, if there are not enough rows for so many.
  const int64_t rows = ceil_div(params.rows, std::max(processors_for<T, kPlain, 1>(), 1));
  if (rows > 4 && vectors <= most_vectors<T, 8>())
    return start<T, kPlain, 8>(params, vectors, 1, stream);
  if (rows > 2 && vectors <= most_vectors<T, 4>())
    return start<T, kPlain, 4>(params, vectors, 1, stream);
  if (rows > 1 && vectors <= most_vectors<T, 2>())
    return start<T, kPlain, 2>(params, vectors, 1, stream);
  const int64_t cluster = ceil_div(vectors, int64_t{most_vectors<T, 1>()});
  return cluster <= kMostInCluster &&
         start<T, kPlain, 1>(params, vectors, static_cast<int>(cluster), stream);
}

}  // namespace

bool start_rows_in_shared_memory(const LossRows& params, cudaStream_t stream) {
  bool is_started = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    is_started =
        is_plain(params) ? start<T, true>(params, stream) : start<T, false>(params, stream);
  });
  return is_started;
}

}  // namespace tch_extension::loss
