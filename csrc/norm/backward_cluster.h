// The backward pass of rows that are too long for one block and begin at multiples of 16 bytes: the
// blocks of a cluster share a row. There is a ring buffer of rows as in backward_ring.h, but no
// block waits for the other blocks' sums at once: a row's gradient is computed after the next row
// has been summed, from the values that are still in the ring buffer.
#pragma once

#include <atomic>

#include "cluster.h"
#include "kernels.h"
#include "ring.h"

namespace tch_extension::norm {
namespace {

// kParameters: whether gradients of weight or bias are wanted.
template <typename Norm, typename T, bool kParameters>
__global__ void __launch_bounds__(kMostThreads, 1) backward_cluster(NormBackward params) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>, kBytes = 16, kVectors = kVectorsOfThread<T>;
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ Pair<C> buffer[kPairsOfSums<Team::kCluster>];
  let_the_next_kernel_start();
  // No block may write into the shared memory of a block that has not started.
  arrive_at_cluster_barrier();
  const int team = blockDim.x, thread = threadIdx.x, stages = params.plan.stages;
  const int cluster = params.plan.cluster, rank = blockIdx.x % cluster;
  const int64_t first_row = blockIdx.x / cluster, step = gridDim.x / cluster;
  const Columns share = columns_of_block(params.columns, kLanes, cluster);
  auto index = [&](int v) { return v * team + thread; };
  auto is_there = [&](int v) { return index(v) < share.vectors; };

  const int next_vector = team * kBytes, next_array = kVectors * next_vector;
  const int next_row = 2 * next_array, end_of_ring = stages * next_row;
  unsigned char* mine = ring + thread * kBytes;
  const int64_t begin = first_row * params.columns + share.column + thread * kLanes;
  const int64_t stride = step * params.columns;
  const T* x_ahead = static_cast<const T*>(params.input) + begin;
  const T* grad_ahead = static_cast<const T*>(params.grad_output) + begin;
  auto copy_row = [&](int64_t row, int at) {
    const bool is_row = row < params.rows;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      // Missing columns and rows are filled with zeros, which add nothing to any sum.
      const bool there = is_row && is_there(v);
      const int offset = v * team * kLanes, bytes = there ? kBytes : 0;
      start_copy(mine + at + v * next_vector, there ? x_ahead + offset : params.input, bytes);
      start_copy(mine + at + next_array + v * next_vector,
                 there ? grad_ahead + offset : params.grad_output, bytes);
    }
    x_ahead += stride;
    grad_ahead += stride;
    end_of_copies_of_a_row();
  };
  auto read = [&](int v, int at) { return unpack<T>(load_words(mine + at + v * next_vector)); };
  auto moments_of = [&](int64_t row) {
    return row < params.rows ? kept_moments<Norm, C>(params, row) : Pair<C>{C(0), C(0)};
  };

  for (int stage = 0; stage < stages - 1; ++stage)
    copy_row(first_row + stage * step, stage * next_row);
  Values<T, kLanes> weight[kVectors];
  C weight_sums[kVectors][kLanes], bias_sums[kVectors][kLanes];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      weight[v].lane[lane] = weight_sums[v][lane] = bias_sums[v][lane] = C(0);
    }
    if (is_there(v)) {
      weight[v] =
          load_or<T, kLanes>(params.weight, share.column + int64_t{index(v)} * kLanes, C(1));
    }
  }

  // A thread's partial sums of the row.
  auto add_up = [&](int at, Pair<C> moments) {
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto x = read(v, at), grad = read(v, at + next_array);
      // x̂ must be zero where there are no columns, too: a huge mean would make it infinite.
      const C rstd = is_there(v) ? moments.second : C(0);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C normal = normal_of<Norm>(x.lane[lane], moments.first, rstd);
        if constexpr (kParameters) {
          weight_sums[v][lane] += grad.lane[lane] * normal;
          bias_sums[v][lane] += grad.lane[lane];
        }
        const C weighted = grad.lane[lane] * weight[v].lane[lane];
        sum.first += weighted;
        sum.second += weighted * normal;
      }
    }
    return sum;
  };
  const C inverse = C(1) / static_cast<C>(params.columns);
  auto write_gradient = [&](int64_t row, int at, Pair<C> moments, Pair<C> sum) {
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
    T* dx = static_cast<T*>(params.grad_input) + row * params.columns + share.column;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (!is_there(v)) continue;
      const auto x = read(v, at);
      auto grad = read(v, at + next_array);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C normal = normal_of<Norm>(x.lane[lane], moments.first, moments.second);
        const C weighted = grad.lane[lane] * weight[v].lane[lane];
        grad.lane[lane] =
            input_gradient<Norm>(moments.second, weighted, mean_grad, normal, mean_product);
      }
      store_whole(dx + static_cast<int64_t>(index(v)) * kLanes, pack<T>(grad));
    }
  };

  const int warps = team / kWarp, warp = thread / kWarp, lane = thread % kWarp;
  constexpr int kSums = kMostInCluster * kMostThreads / kWarp;
  Pair<C> moments = moments_of(first_row), before_moments = {C(0), C(0)};
  int at = 0, before = end_of_ring - next_row, phase = 0;
  // One iteration more than there are rows, for the gradient of the last row. All threads of a
  // cluster do the same number of iterations, because they meet at the cluster's barrier.
  for (int64_t row = first_row; row - step < params.rows; row += step) {
    const bool is_row = row < params.rows, is_first = row == first_row;
    const Pair<C> next_moments = moments_of(row + step);
    Pair<C> sum = {C(0), C(0)};
    if (is_row) {
      wait_for_all_but(stages - 2);
      sum = warp_sum(add_up(at, moments), kWarp);
    }
    // After this wait the sums of the previous row are complete. They are overwritten only after
    // the next barrier.
    wait_at_cluster_barrier();
    Pair<C> total = {C(0), C(0)};
    if (!is_first) {
      for (int of_warp = lane; of_warp < cluster * warps; of_warp += kWarp) {
        const Pair<C> one = buffer[(1 - phase) * kSums + of_warp];
        total.first += one.first;
        total.second += one.second;
      }
    }
    if (is_row) {
      if (lane < cluster) store_in_block(buffer + phase * kSums + rank * warps + warp, lane, sum);
      arrive_at_cluster_barrier();
    }
    if (!is_first && params.grad_input != nullptr) {
      write_gradient(row - step, before, before_moments, warp_sum(total, kWarp));
    }
    copy_row(row + (stages - 1) * step, before);
    before = at;
    at = at + next_row == end_of_ring ? 0 : at + next_row;
    phase = 1 - phase;
    before_moments = moments;
    moments = next_moments;
  }

  if constexpr (kParameters) {
    wait_for_all_but(0);
    auto* sums = reinterpret_cast<C*>(ring);
    const int64_t from = blockIdx.x / cluster * params.columns + share.column;
    auto write = [&](auto& of_thread, void* parts) {
      if (parts == nullptr) return;
      auto place = [&](int v) { return is_there(v) ? index(v) : INT32_MAX; };
      write_block_part<false>(of_thread, static_cast<C*>(parts) + from, share.columns, team, sums,
                              place);
    };
    write(weight_sums, params.weight_parts);
    write(bias_sums, params.bias_parts);
  }
}

template <typename T>
bool fits(const NormBackward& params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const NormPlan& plan = params.plan;
  if (!fits_a_block(plan) || !aligned<T, kLanes>(params)) return false;
  if (plan.stages < 2 || plan.stages > 3 || plan.cluster > kMostInCluster ||
      plan.team != plan.threads) {
    return false;
  }
  const int64_t each = (params.columns / kLanes + plan.cluster - 1) / plan.cluster;
  return each * kLanes <= int64_t{plan.team} * kBackwardValues<T>;
}

template <typename Norm, typename T, bool kParameters>
void start(const NormBackward& params, cudaStream_t stream) {
  constexpr auto kKernel = backward_cluster<Norm, T, kParameters>;
  const int bytes = bytes_of_ring<T>(params.plan);
  // The caller checks for errors after the launch.
  if (allow_shared_memory<kKernel>(bytes) != cudaSuccess) return;
  const ClusterLaunch launch(params.plan, bytes, params.parts, stream);
  cudaLaunchKernelEx(&launch.config, kKernel, params);
}

}  // namespace

template <typename Norm>
bool start_backward_cluster(const NormBackward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = fits<T>(params);
    if (!planned) return;
    has_parts(params) ? start<Norm, T, true>(params, stream)
                      : start<Norm, T, false>(params, stream);
  });
  return planned;
}

// The answer is cached, because the query takes longer than the launch.
template <typename Norm>
int64_t clusters_at_a_time(const NormPlan& plan, int32_t kind) {
  constexpr int kDevices = 64, kKinds = kTchExtensionBFloat16 + 1, kBlocks = 2;
  static std::atomic<int> known[kDevices][kKinds][kBlocks][kMostInCluster + 1];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || plan.cluster > kMostInCluster) return 0;
  int clusters = 0;
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    // This kernel stands for the one of shifted rows, too: the answer depends on the block's shared
    // memory and threads.
    constexpr auto kKernel = backward_cluster<Norm, T, true>;
    const int of_kind = kind, of_threads = plan.threads == kMostThreads ? 1 : 0;
    const bool can_keep = device < kDevices;
    if (can_keep) clusters = known[device][of_kind][of_threads][plan.cluster];
    if (clusters > 0) return;
    const int bytes = bytes_of_ring<T>(plan);
    const ClusterLaunch launch(plan, bytes, 1, nullptr);
    if (allow_shared_memory<kKernel>(bytes) != cudaSuccess ||
        cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config) != cudaSuccess) {
      // Clear this query's error before the next launch check.
      (void)cudaGetLastError();
      clusters = 0;
      return;
    }
    if (can_keep) known[device][of_kind][of_threads][plan.cluster] = clusters;
  });
  return clusters;
}

}  // namespace tch_extension::norm
