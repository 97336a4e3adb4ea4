// The backward for all that loads of 16 bytes can read, or of 4 (of 8, single doubles). Blocks stay for many
// rows; each thread copies what it will need of the next rows of x and dy to places of its own in shared
// memory (a ring of rows), so that bytes under way cost no registers and nobody waits for anybody else's
// copies. Both sums of a row meet at one barrier. The sums for weight and bias stay in registers over all
// rows. Blocks of a cluster share a row too long for one.

#include <atomic>
#include <mutex>

#include "backward.h"

namespace tch_extension {
namespace {

constexpr int kMostInCluster = 8;

// Starts a copy of 4, 8 or 16 bytes; of zeros if there are none.
template <int kBytes>
__device__ __forceinline__ void start_copy(void* to, const void* from, bool there) {
#if __CUDA_ARCH__ >= 800
  const auto shared = static_cast<unsigned int>(__cvta_generic_to_shared(to));
  const int bytes = there ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    // Fewer bytes go by way of the L1 cache only.
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
#else
  using Words = Vector<unsigned int, kBytes / 4>;
  *static_cast<Words*>(to) = there ? *static_cast<const Words*>(from) : Words{};
#endif
}

__device__ __forceinline__ void end_of_copies_of_a_row() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the last `rows` rows are there.
__device__ __forceinline__ void wait_for_all_but(int rows) {
#if __CUDA_ARCH__ >= 800
  // The number is part of the instruction.
  if (rows >= 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (rows == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#endif
}

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same place in the shared memory of another block of the cluster.
template <typename C>
__device__ __forceinline__ void store_in_block(Pair<C>* place, int block, Pair<C> value) {
#if __CUDA_ARCH__ >= 900
  const uint64_t here = reinterpret_cast<uint64_t>(place);
  uint64_t there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(block));
  *reinterpret_cast<Pair<C>*>(there) = value;
#endif
}

// team_sum over all blocks of the cluster, whose threads all come here. `buffer` is of 2 · kMostInCluster ·
// kMostThreads / kWarp pairs.
template <typename C>
__device__ __forceinline__ Pair<C> cluster_sum(Pair<C> sum, int cluster, int rank, Pair<C>* buffer,
                                               int& turn) {
  sum = warp_sum(sum, kWarp);
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Pair<C>* sums = buffer + turn * (kMostInCluster * kMostThreads / kWarp);
  turn = 1 - turn;
  if (lane < cluster) store_in_block(sums + rank * warps + warp, lane, sum);
  cluster_barrier();
  Pair<C> total = {C(0), C(0)};
  for (int index = lane; index < cluster * warps; index += kWarp) {
    total.first += sums[index].first;
    total.second += sums[index].second;
  }
  return warp_sum(total, kWarp);
}

enum class Team { kWithinWarp, kBlock, kCluster };

// What a block has of the rows: where it is, and where its rows are.
struct Share {
  int vectors;     // of a row
  int64_t column;  // the first
  int64_t start;   // the first row of the block's first team
  int64_t step;    // rows of all blocks' teams together
  int64_t part;    // of the sums over rows
};

template <typename T, int kLanes, Team kTeam>
__device__ __forceinline__ Share share_of_block(const LayerNormBackward& params) {
  const int cluster = kTeam == Team::kCluster ? params.plan.cluster : 1;
  const int teams = teams_of_block(params.plan.team);
  const int64_t all = params.columns / kLanes;
  const int64_t each = (all + cluster - 1) / cluster;
  const int64_t first = (blockIdx.x % cluster) * each;
  const int64_t left = all - first;
  Share share;
  share.vectors = static_cast<int>(left < 0 ? 0 : left < each ? left : each);
  share.column = first * kLanes;
  share.part = blockIdx.x / cluster;
  share.start = share.part * teams;
  share.step = static_cast<int64_t>(gridDim.x / cluster) * teams;
  return share;
}

// kParameters: whether weight or bias want gradients.
template <typename T, int kLanes, Team kTeam, bool kParameters>
__global__ void __launch_bounds__(kMostThreads, 1) layer_norm_backward_ring(LayerNormBackward params) {
  using C = Compute<T>;
  constexpr int kBytes = kLanes * sizeof(T);
  constexpr int kVectors = kBackwardValues<T> / kLanes;
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp * (kTeam == Team::kCluster ? kMostInCluster : 1)];
  let_the_next_kernel_start();
  // Nobody writes into a block that has not begun.
  if constexpr (kTeam == Team::kCluster) cluster_barrier();
  int turn = 0;
  const int team = params.plan.team, stages = params.plan.stages;
  const int thread = thread_of_team(team);
  const Share share = share_of_block<T, kLanes, kTeam>(params);
  // A thread's places in the ring: for each row a vector of x for each v, then those of dy.
  const int next_vector = blockDim.x * kBytes;
  const int next_row = 2 * kVectors * next_vector, end_of_ring = stages * next_row;
  unsigned char* mine = ring + threadIdx.x * kBytes;

  const int64_t first_row = share.start + team_of_block(team);
  const int64_t stride = share.step * params.columns;
  const int64_t begin = first_row * params.columns + share.column + thread * kLanes;
  int64_t row_ahead = first_row;
  const T* x_ahead = static_cast<const T*>(params.input) + begin;
  const T* grad_ahead = static_cast<const T*>(params.grad_output) + begin;
  auto copy_next_row = [&](int at) {
    const bool is_row = row_ahead < params.rows;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      // What is not there is zeros, and adds nothing to any sum.
      const bool there = is_row && v * team + thread < share.vectors;
      const int offset = v * team * kLanes;
      start_copy<kBytes>(mine + at + v * next_vector, there ? x_ahead + offset : params.input, there);
      start_copy<kBytes>(mine + at + (kVectors + v) * next_vector,
                         there ? grad_ahead + offset : params.grad_output, there);
    }
    row_ahead += share.step;
    x_ahead += stride;
    grad_ahead += stride;
    end_of_copies_of_a_row();
  };
  auto moments_of = [&](int64_t row) {
    return row < params.rows ? kept_moments<C>(params, row) : Pair<C>{C(0), C(0)};
  };

  for (int stage = 0; stage < stages - 1; ++stage) copy_next_row(stage * next_row);
  Pair<C> next_moments = moments_of(first_row);
  Values<T, kLanes> weight[kVectors];
  C weight_sums[kVectors][kLanes], bias_sums[kVectors][kLanes];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * team + thread;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      weight[v].lane[lane] = weight_sums[v][lane] = bias_sums[v][lane] = C(0);
    }
    if (index < share.vectors) {
      weight[v] =
          load_or<T, kLanes>(params.weight, share.column + static_cast<int64_t>(index) * kLanes, C(1));
    }
  }

  const C inverse = C(1) / static_cast<C>(params.columns);
  T* to = static_cast<T*>(params.grad_input) + begin;
  int at = 0;
  // All threads of a cluster's blocks make as many steps: they meet in the sums.
  for (int64_t first = share.start, row = first_row; first < params.rows; first += share.step) {
    const Pair<C> moments = next_moments;
    next_moments = moments_of(row + share.step);
    // Into the place of the row before, which this thread alone has read, and has done with.
    copy_next_row(at == 0 ? end_of_ring - next_row : at - next_row);
    wait_for_all_but(stages - 1);

    // x̂, and the gradient times the weight.
    Values<T, kLanes> normal[kVectors], grad[kVectors];
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto stored_x = *reinterpret_cast<const Vector<T, kLanes>*>(mine + at + v * next_vector);
      const auto stored_grad =
          *reinterpret_cast<const Vector<T, kLanes>*>(mine + at + (kVectors + v) * next_vector);
      normal[v] = unpack<T, kLanes>(stored_x);
      grad[v] = unpack<T, kLanes>(stored_grad);
      // Where no columns are, x̂ must be zero, too: a huge mean would make it infinite.
      const C rstd = v * team + thread < share.vectors ? moments.second : C(0);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        normal[v].lane[lane] = (normal[v].lane[lane] - moments.first) * rstd;
        if constexpr (kParameters) {
          weight_sums[v][lane] += grad[v].lane[lane] * normal[v].lane[lane];
          bias_sums[v][lane] += grad[v].lane[lane];
        }
        grad[v].lane[lane] *= weight[v].lane[lane];
        sum.first += grad[v].lane[lane];
        sum.second += grad[v].lane[lane] * normal[v].lane[lane];
      }
    }
    at = at + next_row == end_of_ring ? 0 : at + next_row;
    if constexpr (kTeam == Team::kCluster) {
      sum = cluster_sum(sum, params.plan.cluster, blockIdx.x % params.plan.cluster, buffer, turn);
    } else {
      sum = team_sum < kTeam == Team::kWithinWarp > (sum, team, buffer, turn);
    }
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
    const bool is_asked_for = params.grad_input != nullptr && row < params.rows;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        grad[v].lane[lane] =
            moments.second * (grad[v].lane[lane] - mean_grad - normal[v].lane[lane] * mean_product);
      }
      if (is_asked_for && v * team + thread < share.vectors) {
        store_values<T, kLanes>(to, v * team * kLanes, grad[v]);
      }
    }
    row += share.step;
    to += stride;
  }

  if constexpr (kParameters) {
    wait_for_all_but(0);
    auto* sums = reinterpret_cast<C*>(ring);
    const int64_t from = share.part * params.columns + share.column;
    if (params.weight_parts != nullptr) {
      write_block_part(weight_sums, static_cast<C*>(params.weight_parts) + from, share.vectors, team, sums);
    }
    if (params.bias_parts != nullptr) {
      write_block_part(bias_sums, static_cast<C*>(params.bias_parts) + from, share.vectors, team, sums);
    }
  }
}

template <typename T, int kLanes>
bool fits(const LayerNormBackward& params) {
  const LayerNormPlan& plan = params.plan;
  if (params.kind != params.parameter_kind || !fits_a_block(plan) || !aligned<T, kLanes>(params))
    return false;
  if (plan.stages < 2 || plan.stages > 3 || plan.cluster > kMostInCluster) return false;
  if (plan.cluster > 1 && plan.team != plan.threads) return false;
  const int64_t each = (params.columns / kLanes + plan.cluster - 1) / plan.cluster;
  return each * kLanes <= int64_t{plan.team} * kBackwardValues<T>;
}

template <typename T>
int bytes_of_ring(const LayerNormPlan& plan) {
  return plan.stages * 2 * kBackwardValues<T> * static_cast<int>(sizeof(T)) * plan.threads;
}

// More than 48 KiB of shared memory have to be asked for, once for each kernel and device.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  // The limit counts the kernel's own arrays, too.
  constexpr int kDevices = 64, kAlwaysAllowed = 40 << 10;
  static std::mutex mutex;
  static int allowed[kDevices];
  if (bytes <= kAlwaysAllowed) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  // One at a time: the last call counts, and one for fewer bytes would take away what another was given.
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < kDevices && allowed[device] >= bytes) return cudaSuccess;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = bytes;
  return error;
}

// The launch of one kernel; `blocks` of it.
struct Launch {
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};

  Launch(const LayerNormPlan& plan, int bytes, int64_t parts, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned int>(parts * plan.cluster));
    config.blockDim = dim3(static_cast<unsigned int>(plan.threads));
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    if (plan.cluster == 1) return;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned int>(plan.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

template <typename T, int kLanes, Team kTeam, bool kParameters>
void start_kernel(const LayerNormBackward& params, cudaStream_t stream) {
  constexpr auto kKernel = layer_norm_backward_ring<T, kLanes, kTeam, kParameters>;
  const int bytes = bytes_of_ring<T>(params.plan);
  // Errors are read behind the launch.
  if (allow_shared_memory<kKernel>(bytes) != cudaSuccess) return;
  const Launch launch(params.plan, bytes, params.parts, stream);
  cudaLaunchKernelEx(&launch.config, kKernel, params);
}

template <typename T, int kLanes, bool kParameters>
void start(const LayerNormBackward& params, cudaStream_t stream) {
  if (params.plan.cluster > 1) {
    start_kernel<T, kLanes, Team::kCluster, kParameters>(params, stream);
  } else if (params.plan.team <= kWarp) {
    start_kernel<T, kLanes, Team::kWithinWarp, kParameters>(params, stream);
  } else {
    start_kernel<T, kLanes, Team::kBlock, kParameters>(params, stream);
  }
}

}  // namespace

const char* start_layer_norm_backward_ring(const LayerNormBackward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool parameters = params.weight_parts != nullptr || params.bias_parts != nullptr;
    auto start_if_it_fits = [&](auto lanes) {
      planned = fits<T, lanes()>(params);
      if (!planned) return;
      parameters ? start<T, lanes(), true>(params, stream) : start<T, lanes(), false>(params, stream);
    };
    if (params.plan.lanes == kLanesOf16Bytes<T>) {
      start_if_it_fits(std::integral_constant<int, kLanesOf16Bytes<T>>{});
    } else if (params.plan.lanes == kLanesOf4Bytes<T>) {
      start_if_it_fits(std::integral_constant<int, kLanesOf4Bytes<T>>{});
    }
  });
  return planned ? nullptr : "internal error: the plan does not fit the arrays";
}

}  // namespace tch_extension

// How many clusters of this plan the current device can run at a time; 0 if none. Asked once for each: it
// takes longer than the launch.
extern "C" int64_t tch_extension_layer_norm_clusters(const LayerNormPlan* plan, int32_t kind) {
  using namespace tch_extension;
  constexpr int kDevices = 64, kKinds = kTchExtensionBFloat16 + 1, kBlocks = 2;
  static std::atomic<int> known[kDevices][kKinds][kBlocks][kMostInCluster + 1];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || plan->cluster > kMostInCluster) return 0;
  int clusters = 0;
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    // Any lanes: the block's memory and threads decide.
    constexpr auto kKernel = layer_norm_backward_ring<T, kLanesOf16Bytes<T>, Team::kCluster, true>;
    const int of_kind = kind, of_threads = plan->threads == kMostThreads ? 1 : 0;
    const bool can_keep = device < kDevices;
    if (can_keep) clusters = known[device][of_kind][of_threads][plan->cluster];
    if (clusters > 0) return;
    const int bytes = bytes_of_ring<T>(*plan);
    if (allow_shared_memory<kKernel>(bytes) != cudaSuccess) return;
    const Launch launch(*plan, bytes, 1, nullptr);
    if (cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config) != cudaSuccess) clusters = 0;
    if (can_keep) known[device][of_kind][of_threads][plan->cluster] = clusters;
  });
  return clusters;
}
