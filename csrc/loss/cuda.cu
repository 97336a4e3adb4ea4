// A block computes a row at a time. Short rows that are whole 16-byte vectors stay in registers.
// Others are read twice, the second time from the L2 cache if they are still there, unless
// rows_hopper.cu takes them.
#include "rows.h"

namespace tch_extension::loss {
namespace {

constexpr int kMostThreads = 1024;

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

// Calls body(row) for each row of this block that has a loss.
template <typename T, typename Body>
__device__ __forceinline__ void for_each_row(const LossRows& params, Body body) {
  for (int64_t index = blockIdx.x; index < params.rows; index += gridDim.x) {
    const Row<T, false> row(params, index, params.targets[index]);
    if (!row.is_ignored) {
      body(row);
      continue;
    }
    if (threadIdx.x == 0) row.write_no_loss();
    if (row.gradients != nullptr) write_zeros(row, 0, params.classes);
  }
}

// The sums of a row of which each thread has added up its part. The loss is written here.
template <typename T>
__device__ __forceinline__ Sums<T> finish_sums(const Row<T, false>& row, Sums<T> sums) {
  Compute<T> at_target = 0;
  // Before the gradients: they may be written over the logits.
  if (threadIdx.x == 0) at_target = row.logit_of_target();
  sums = sum_of_block(sums, row.is_smooth());
  if (threadIdx.x == 0) row.write_loss(sums, at_target);
  return sums;
}

// Rows of at most one vector a thread.
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_registers(const __grid_constant__ LossRows params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const int64_t at = static_cast<int64_t>(threadIdx.x) * kLanes;
  const bool is_there = at < params.classes;
  for_each_row<T>(params, [&](const Row<T, false>& row) {
    Vector<T, kLanes> kept;
    Sums<T> sums = Sums<T>::none();
    if (is_there) {
      kept = load_vector<T, kLanes>(row.logits, at);
      row.template sum_up<kLanes>(unpack<T, kLanes>(kept), at, sums);
    }
    sums = finish_sums(row, sums);
    if (row.gradients == nullptr || !is_there) return;
    const Gradient<T, false> gradient(row, sums);
    store_values<T, kLanes>(row.gradients, at, gradient(unpack<T, kLanes>(kept), at));
  });
}

// Rows of any length that begin anywhere, if kLanes is 1.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_two_passes(const __grid_constant__ LossRows params) {
  const int64_t begin = static_cast<int64_t>(threadIdx.x) * kLanes;
  const int64_t by = static_cast<int64_t>(blockDim.x) * kLanes;
  for_each_row<T>(params, [&](const Row<T, false>& row) {
    Sums<T> sums = Sums<T>::none();
    for (int64_t at = begin; at < params.classes; at += by)
      row.template sum_up<kLanes>(load_values<T, kLanes>(row.logits, at), at, sums);
    sums = finish_sums(row, sums);
    if (row.gradients == nullptr) return;
    const Gradient<T, false> gradient(row, sums);
    for (int64_t at = begin; at < params.classes; at += by)
      store_values<T, kLanes>(row.gradients, at,
                              gradient(load_values<T, kLanes>(row.logits, at), at));
  });
}

template <typename C>
__device__ __forceinline__ C sum_of_warp(C sum) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// One block adds the values of all rows, always in the same order.
template <typename C, typename Value>
__device__ __forceinline__ C sum_of_rows(int64_t rows, Value value) {
  __shared__ C of_warp[kMostThreads / kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  C sum = 0;
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) sum += value(row);
  sum = sum_of_warp(sum);
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  return sum_of_warp(lane < warps ? of_warp[lane] : C(0));
}

template <typename C>
__global__ void __launch_bounds__(kMostThreads)
    mean_kernel(const __grid_constant__ LossMean params) {
  const C* weight = static_cast<const C*>(params.weight);
  const C sum = sum_of_rows<C>(params.rows, [&](int64_t row) {
    const int64_t target = params.targets[row];
    if (target == params.ignore_index) return C(0);
    // The kernel of the rows says so if it is no class; here it must not be read.
    return weight == nullptr                        ? C(1)
           : target < 0 || target >= params.classes ? C(0)
                                                    : weight[target];
  });
  if (threadIdx.x == 0) *static_cast<C*>(params.factor) = C(1) / sum;
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    total_kernel(const __grid_constant__ LossTotal params) {
  using C = Compute<T>;
  const C* losses = static_cast<const C*>(params.losses);
  const C sum = sum_of_rows<C>(params.rows, [&](int64_t row) { return losses[row]; });
  if (threadIdx.x == 0) {
    *static_cast<T*>(params.total) = static_cast<T>(sum * *static_cast<const C*>(params.factor));
  }
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

// As many warps as a row has vectors for, up to the largest block.
int threads_for(int64_t vectors) {
  const int64_t warps = (vectors + kWarp - 1) / kWarp;
  const int64_t most = kMostThreads / kWarp;
  return static_cast<int>((warps < 1 ? 1 : warps < most ? warps : most) * kWarp);
}

// Shorter rows are computed faster in registers, or with single loads if they begin anywhere.
constexpr int64_t kWorthACopy = 4096;

template <typename T>
void start_rows(const LossRows& params, unsigned int blocks, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const bool is_whole = params.classes % kLanes == 0 && params.row_stride % kLanes == 0 &&
                        is_aligned_to_16(params.logits) && is_aligned_to_16(params.gradients);
  const int64_t vectors = params.classes / kLanes;
  if (params.classes * static_cast<int64_t>(sizeof(T)) > kWorthACopy &&
      start_rows_in_shared_memory(params, stream)) {
    return;
  }
  if (!is_whole) {
    rows_in_two_passes<T, 1><<<blocks, threads_for(params.classes), 0, stream>>>(params);
  } else if (vectors <= kMostThreads) {
    rows_in_registers<T><<<blocks, threads_for(vectors), 0, stream>>>(params);
  } else {
    rows_in_two_passes<T, kLanes><<<blocks, kMostThreads, 0, stream>>>(params);
  }
}

unsigned int at_most(int64_t blocks) {
  return static_cast<unsigned int>(blocks < INT32_MAX ? blocks : INT32_MAX);
}

}  // namespace
}  // namespace tch_extension::loss

using namespace tch_extension;
using namespace tch_extension::loss;

extern "C" LaunchStatus tch_extension_loss_rows_cuda(const LossRows* params, cudaStream_t stream) {
  if (params->rows > 0) {
    for_kind(params->kind, [&](auto type) {
      start_rows<typename decltype(type)::type>(*params, at_most(params->rows), stream);
    });
  }
  return launch_status("loss_rows");
}

extern "C" LaunchStatus tch_extension_loss_mean_cuda(const LossMean* params, cudaStream_t stream) {
  for_kind(params->kind, [&](auto type) {
    using C = Compute<typename decltype(type)::type>;
    mean_kernel<C><<<1, threads_for(params->rows), 0, stream>>>(*params);
  });
  return launch_status("loss_mean");
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
