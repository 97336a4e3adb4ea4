// Sums, largest values and other reductions over the threads of a warp or a block, for kernels in
// which a warp or a block computes a row.
//
//   // A block for each row. The largest value of no columns is the one that is no larger than any.
//   __global__ void largest_of_rows(const float* x, float* y, int64_t columns) {
//     const float* row = x + blockIdx.x * columns;
//     float largest = -INFINITY;
//     for (int64_t at = threadIdx.x; at < columns; at += blockDim.x)
//       largest = fmaxf(largest, row[at]);
//     largest = block_reduce(largest, [](float a, float b) { return fmaxf(a, b); });
//     if (threadIdx.x == 0) y[blockIdx.x] = largest;
//   }
//
// The order in which values are combined depends on the number of threads only, so a sum has the
// same bits every time.
//
// Needs: the CUDA toolkit; no torch header.
#pragma once

#include "tch_extension/launch.h"

namespace tch_extension {

// Combines the values of each kLanes adjacent lanes of a warp, where kLanes is a power of two. All
// of these lanes get the result, with the same bits if combine(a, b) is combine(b, a). Every lane
// of the warp has to call this, one without a value of its own with a neutral one, such as 0 for a
// sum.
template <int kLanes = kWarp, typename C, typename Combine>
__device__ __forceinline__ C warp_reduce(C value, Combine combine) {
  static_assert(kLanes > 0 && kLanes <= kWarp && (kLanes & (kLanes - 1)) == 0,
                "the lanes of a warp are combined in groups of a power of two");
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, apart));
  return value;
}

// The same for a block of one dimension, whose number of threads is a multiple of kWarp. All
// threads get the result. Every thread of the block has to call this.
template <typename C, typename Combine>
__device__ __forceinline__ C block_reduce(C value, Combine combine) {
  constexpr int kMostWarps = 1024 / kWarp;
  __shared__ C of_warps[kMostWarps];
  value = warp_reduce(value, combine);
  // Nobody may write before all have read what an earlier call left.
  __syncthreads();
  if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  C all = of_warps[0];
  for (unsigned int warp = 1; warp < blockDim.x / kWarp; ++warp) all = combine(all, of_warps[warp]);
  return all;
}

}  // namespace tch_extension
