// Sums of the columns of a matrix on CUDA. The matrix need not exist in memory: a loader, a plain
// struct with
//
//   static constexpr int kUnroll = 4;  // rows that a thread asks for at a time, a power of two
//   template <typename T, int kLanes> __device__ auto fetch(int64_t row, int64_t column) const;
//   template <typename T, int kLanes, typename Fetched>
//   __device__ Values<T, kLanes> values(const Fetched& fetched, int64_t row, int64_t column) const;
//
// returns its vectors, and each function is called once per vector. There are two functions because
// `values` may store something, and a load is not moved ahead of a store.
//
//   start_column_sums<T, kLanes>(sums, loader, stream);
//   finish_column_sums<T>(sums, stream);  // if there are several slabs, or if rows are folded
//
// If rows are folded (column_sums.h), the loader sees the rows and columns of folded(sums). Its
// last row may be short, and the loader has to return zeros for elements beyond rows · columns.
//
// Each thread block sums one slab of rows for one tile of columns. Its threads are arranged in x
// columns and y rows, and the y partial sums of a column are added as a tree. There are no atomics,
// so the order of additions is always the same.
//
// Needs: the CUDA toolkit; no torch header.
#pragma once

#include "tch_extension/column_sums.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension {

// Adds the sums of all threads that share a column. blockDim.x · blockDim.y = kThreads, and both
// are powers of two.
template <typename T, int kLanes>
__device__ __forceinline__ void sum_over_y(Values<T, kLanes>& sum) {
  // The layout is lane by lane, so that adjacent threads use adjacent banks of shared memory.
  __shared__ Compute<T> shared[kLanes * kThreads];
  const unsigned int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) shared[lane * kThreads + thread] = sum.lane[lane];
  for (unsigned int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        shared[lane * kThreads + thread] += shared[lane * kThreads + thread + half * blockDim.x];
      }
    }
  }
  // No barrier is needed here: the threads with y = 0 read what they have written themselves.
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) sum.lane[lane] = shared[lane * kThreads + thread];
}

// Out is the type to which the sums are rounded if there is only one slab.
template <typename T, typename Out, int kLanes, typename Loader>
__global__ void __launch_bounds__(kThreads)
    column_sums_kernel(TchExtensionColumnSums sums, Loader loader) {
  constexpr int kUnroll = Loader::kUnroll;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLanes;
  const int64_t slab_rows = (sums.rows + gridDim.y - 1) / gridDim.y;
  const int64_t from = blockIdx.y * slab_rows;
  const int64_t to = from + slab_rows < sums.rows ? from + slab_rows : sums.rows;
  const int64_t step = blockDim.y;
  Values<T, kLanes> sum[kUnroll] = {};
  if (column < sums.columns) {
    int64_t row = from + threadIdx.y;
    for (; row < to; row += kUnroll * step) {
      decltype(loader.template fetch<T, kLanes>(row, column)) fetched[kUnroll];
      // Rows beyond the end are skipped here and not in a loop of their own, in which each load
      // would wait for the one before.
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (row + i * step < to)
          fetched[i] = loader.template fetch<T, kLanes>(row + i * step, column);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (row + i * step >= to) break;
        const auto values = loader.template values<T, kLanes>(fetched[i], row + i * step, column);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) sum[i].lane[lane] += values.lane[lane];
      }
    }
  }
  // Add the kUnroll sums as a tree.
#pragma unroll
  for (int half = kUnroll / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sum[i].lane[lane] += sum[i + half].lane[lane];
    }
  }
  // All threads must call this, even those beyond the last column, because it has barriers.
  sum_over_y<T, kLanes>(sum[0]);
  if (threadIdx.y != 0 || column >= sums.columns) return;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    if (sums.partial == nullptr) {
      static_cast<Out*>(sums.sums)[column + lane] = static_cast<Out>(sum[0].lane[lane]);
    } else {
      static_cast<Compute<T>*>(sums.partial)[blockIdx.y * sums.columns + column + lane] =
          sum[0].lane[lane];
    }
  }
}

template <typename T, typename Out, int kLanes, typename Loader>
inline void start_column_sums_in(const TchExtensionColumnSums& sums, unsigned int slabs,
                                 const Loader& loader, cudaStream_t stream) {
  const int64_t vectors = sums.columns / kLanes;
  unsigned int x = 1;
  while (x < 16 && x < vectors) x *= 2;
  const dim3 blocks(static_cast<unsigned int>((vectors + x - 1) / x), slabs);
  column_sums_kernel<T, Out, kLanes><<<blocks, dim3(x, kThreads / x), 0, stream>>>(sums, loader);
}

inline bool is_folded(const TchExtensionColumnSums& sums) { return sums.fold > 1; }

// The matrix that a loader of folded rows reads. Its partial sums, [S, F·N], are S·F rows of N.
inline TchExtensionColumnSums folded(const TchExtensionColumnSums& sums) {
  TchExtensionColumnSums longer = sums;
  longer.rows = (sums.rows + sums.fold - 1) / sums.fold;
  longer.columns = sums.columns * sums.fold;
  longer.fold = 1;
  return longer;
}

// kLanes must divide the number of columns (of folded(sums), if rows are folded), and there must be
// at least one column.
template <typename T, int kLanes, typename Loader>
inline void start_column_sums(const TchExtensionColumnSums& sums, const Loader& loader,
                              cudaStream_t stream) {
  const auto slabs = static_cast<unsigned int>(sums.slabs);
  start_column_sums_in<T, T, kLanes>(is_folded(sums) ? folded(sums) : sums, slabs, loader, stream);
}

struct PartialSums {
  static constexpr int kUnroll = 4;

  const void* partial;
  int64_t columns;

  template <typename T, int kLanes>
  __device__ __forceinline__ Vector<T, kLanes> fetch(int64_t slab, int64_t column) const {
    return load_vector<T, kLanes>(partial, slab * columns + column);
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ Values<T, kLanes> values(const Vector<T, kLanes>& fetched, int64_t,
                                                      int64_t) const {
    return values_of(fetched);
  }
};

template <typename T>
inline void finish_column_sums(const TchExtensionColumnSums& sums, cudaStream_t stream) {
  TchExtensionColumnSums last = sums;
  last.rows = is_folded(sums) ? sums.slabs * sums.fold : sums.slabs;
  last.partial = nullptr;
  start_column_sums_in<Compute<T>, T, 1>(last, 1, PartialSums{sums.partial, sums.columns}, stream);
}

}  // namespace tch_extension
