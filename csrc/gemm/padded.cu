// The kernels before and after a product whose rows do not begin at multiples of 16 bytes. One
// copies its operands to padded rows, the other copies the padded result to the output. They are
// bound by memory bandwidth. Each thread writes 16 bytes at a time.
#include <type_traits>

#include "product.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::gemm {
namespace {

using Lines = GemmLines;
using Padding = GemmPadFactors;
using Finish = GemmFinishProduct;

constexpr int kFactors = std::extent_v<decltype(Padding::factor)>;

template <typename T>
__device__ __forceinline__ T rectified(T value) {
  // Not max(), which would turn NaN into 0.
  return static_cast<Compute<T>>(value) < 0 ? T(0) : value;
}

// Writes 16 bytes of a padded line. The values are read one by one, all but the first from the L1
// cache; loading whole vectors and shifting them was slower.
template <typename T, typename Index>
__device__ __forceinline__ void pad(const Lines& lines, int64_t at) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const Index vectors = static_cast<Index>(lines.padded_length / kLanes);
  const Index line = static_cast<Index>(at) / vectors;
  const int64_t first = static_cast<int64_t>(static_cast<Index>(at) % vectors) * kLanes;
  const Index padded_lines = static_cast<Index>(lines.padded_lines);
  const int64_t matrix = lines.matrices == 1 ? 0 : static_cast<int64_t>(line / padded_lines);
  const int64_t of_matrix = static_cast<int64_t>(line) - matrix * lines.padded_lines;
  const int64_t length = of_matrix < lines.lines ? lines.length : 0;
  const T* from =
      static_cast<const T*>(lines.from) + matrix * lines.batch + of_matrix * lines.line + first;
  Vector<T, kLanes> vector;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane)
    vector.lane[lane] = first + lane < length ? from[lane] : T(0);
  *reinterpret_cast<Vector<T, kLanes>*>(static_cast<T*>(lines.to) + at * kLanes) = vector;
}

struct Ends {
  int64_t end[kFactors];
};

template <typename T, typename Index>
__global__ void __launch_bounds__(kThreads) pad_factors_kernel(Padding padding, Ends ends) {
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; at < ends.end[2];
       at += static_cast<int64_t>(gridDim.x) * kThreads) {
    if (at < ends.end[0]) {
      pad<T, Index>(padding.factor[0], at);
    } else if (at < ends.end[1]) {
      pad<T, Index>(padding.factor[1], at - ends.end[0]);
    } else {
      pad<T, Index>(padding.factor[2], at - ends.end[1]);
    }
  }
}

// kLanes consecutive values of the output, which may come from two or more rows.
template <typename T, typename Index, bool kPadded>
__device__ __forceinline__ Vector<T, kLanesOf16Bytes<T>> gather(const Finish& finish, int64_t at,
                                                                int64_t all) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const T* from = static_cast<const T*>(finish.from);
  Vector<T, kLanes> vector;
  if constexpr (kPadded) {
    Index row = static_cast<Index>(at) / static_cast<Index>(finish.columns);
    int64_t column =
        static_cast<int64_t>(static_cast<Index>(at) % static_cast<Index>(finish.columns));
    const Index rows = static_cast<Index>(finish.rows);
    const int64_t unused = finish.padded_rows - finish.rows;  // rows of padding per matrix
    const auto begin = [&] {
      const int64_t before = unused == 0 ? 0 : static_cast<int64_t>(row / rows) * unused;
      return (static_cast<int64_t>(row) + before) * finish.padded_columns;
    };
    int64_t from_row = begin();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      vector.lane[lane] = at + lane < all ? from[from_row + column] : T(0);
      if (++column == finish.columns) ++row, column = 0, from_row = begin();
    }
  } else {
    if (at + kLanes <= all) return *reinterpret_cast<const Vector<T, kLanes>*>(from + at);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      vector.lane[lane] = at + lane < all ? from[at + lane] : T(0);
  }
  return vector;
}

template <typename T, typename Index, bool kPadded>
__global__ void __launch_bounds__(kThreads) finish_product_kernel(Finish finish, int64_t all) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  T* out = static_cast<T*>(finish.out);
  // An output that is not 16-byte aligned is written value by value.
  const bool is_even = reinterpret_cast<uintptr_t>(out) % sizeof(Vector<T, kLanes>) == 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kLanes;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kLanes; at < all;
       at += step) {
    auto vector = gather<T, Index, kPadded>(finish, at, all);
    if (finish.relu) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) vector.lane[lane] = rectified(vector.lane[lane]);
    }
    if (is_even && at + kLanes <= all) {
      *reinterpret_cast<Vector<T, kLanes>*>(out + at) = vector;
    } else {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (at + lane < all) out[at + lane] = vector.lane[lane];
      }
    }
  }
}

constexpr int64_t kNarrow = INT32_MAX / 2;  // below this, 32-bit indices suffice

template <typename T, bool kPadded>
void start(const Finish& finish, cudaStream_t stream) {
  const int64_t all = finish.batch * finish.rows * finish.columns;
  const unsigned int blocks = blocks_for(ceil_div(all, kLanesOf16Bytes<T>));
  if (all < kNarrow) {
    finish_product_kernel<T, uint32_t, kPadded><<<blocks, kThreads, 0, stream>>>(finish, all);
  } else {
    finish_product_kernel<T, int64_t, kPadded><<<blocks, kThreads, 0, stream>>>(finish, all);
  }
}

template <typename T>
void start(const Padding& padding, cudaStream_t stream) {
  Ends ends{};
  int64_t all = 0;
  for (int i = 0; i < kFactors; ++i) {
    const Lines& lines = padding.factor[i];
    all += lines.matrices * lines.padded_lines * (lines.padded_length / kLanesOf16Bytes<T>);
    ends.end[i] = all;
  }
  if (all < kNarrow) {
    pad_factors_kernel<T, uint32_t><<<blocks_for(all), kThreads, 0, stream>>>(padding, ends);
  } else {
    pad_factors_kernel<T, int64_t><<<blocks_for(all), kThreads, 0, stream>>>(padding, ends);
  }
}

}  // namespace
}  // namespace tch_extension::gemm

using namespace tch_extension;
using namespace tch_extension::gemm;

extern "C" LaunchStatus tch_extension_gemm_pad_factors_cuda(const GemmPadFactors* factors,
                                                            cudaStream_t stream) {
  for_kind(factors->kind,
           [&](auto type) { start<typename decltype(type)::type>(*factors, stream); });
  return launch_status("pad_factors");
}

extern "C" LaunchStatus tch_extension_gemm_finish_product_cuda(const GemmFinishProduct* finish,
                                                               cudaStream_t stream) {
  const bool is_padded =
      finish->padded_columns != finish->columns || finish->padded_rows != finish->rows;
  for_kind(finish->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    // An input that is not 16-byte aligned is read value by value, too.
    const bool is_even = is_aligned_to_16(finish->from);
    is_padded || !is_even ? start<T, true>(*finish, stream) : start<T, false>(*finish, stream);
  });
  return launch_status("finish_product");
}
