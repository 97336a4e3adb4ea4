// What the ways in which the kernels compute rows share.
#pragma once

#include "loss.h"
#include "row.h"

namespace tch_extension::loss {
namespace {

constexpr int kMostThreads = 1024;

template <typename C>
__device__ __forceinline__ C sum_of_warp(C sum) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// The sum over a block, always in the same order; all threads get it.
template <typename C>
__device__ __forceinline__ C sum_of_block(C sum) {
  __shared__ C of_warp[kMostThreads / kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  sum = sum_of_warp(sum);
  // Nobody may write before all have read an earlier sum.
  __syncthreads();
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  return sum_of_warp(lane < warps ? of_warp[lane] : C(0));
}

// One block adds the values of all rows, always in the same order. Several loads are on their way
// at a time, because a single block waits for most of its time.
template <typename C, typename Value>
__device__ __forceinline__ C sum_of_rows(int64_t rows, Value value) {
  constexpr int kAtOnce = 8;
  const int64_t by = blockDim.x;
  C parts[kAtOnce] = {};
  int64_t row = threadIdx.x;
  for (; row + (kAtOnce - 1) * by < rows; row += kAtOnce * by) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) parts[i] += value(row + i * by);
  }
  if (row < rows) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Beyond the last row one is read again, so that no load waits for another.
      const int64_t at = row + i * by;
      const C next = value(at < rows ? at : row);
      if (at < rows) parts[i] += next;
    }
  }
  C sum = 0;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sum += parts[i];
  return sum_of_block(sum);
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

}  // namespace

// Whether there are neither weights nor smoothing, softcap or z-loss.
inline bool is_plain(const LossRows& params) {
  return params.weight == nullptr && params.label_smoothing == 0 && params.softcap == 0 &&
         params.z_loss == 0;
}

// Starts a kernel that reads rows once, whatever their length, as far as it fits in the shared
// memory of eight multiprocessors. Starts nothing, and returns false, if the current device is no
// Hopper.
bool start_rows_in_shared_memory(const LossRows& params, cudaStream_t stream);

}  // namespace tch_extension::loss
