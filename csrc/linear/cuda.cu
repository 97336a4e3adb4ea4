// The kernel is memory-bound: it reads every element of dY once, 16 bytes per thread where sizes
// and addresses allow.

#include "linear.h"
#include "tch_extension/cuda_column_sums.h"

namespace tch_extension {
namespace {

// If kFolded, the last row may be short.
template <bool kFolded>
struct Rows {
  static constexpr int kUnroll = 4;

  const void* grad;
  int64_t row_stride;
  int64_t elements;

  template <typename T, int kLanes>
  __device__ __forceinline__ Vector<T, kLanes> fetch(int64_t row, int64_t column) const {
    const int64_t at = row * row_stride + column;
    if (kFolded && at + kLanes > elements) return load_part<T, kLanes>(grad, at, elements - at);
    return load_vector<T, kLanes>(grad, at);
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ Values<T, kLanes> values(const Vector<T, kLanes>& fetched, int64_t,
                                                      int64_t) const {
    return values_of(fetched);
  }
};

bool allows_vectors(const LinearBiasGrad& params, int lanes) {
  return params.sums.columns % lanes == 0 && params.row_stride % lanes == 0 &&
         is_aligned_to_16(params.grad);
}

template <typename T>
void start(const LinearBiasGrad& params, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const TchExtensionColumnSums& sums = params.sums;
  const int64_t elements = sums.rows * sums.columns;
  if (is_folded(sums)) {
    start_column_sums<T, kLanes>(sums, Rows<true>{params.grad, sums.fold * sums.columns, elements},
                                 stream);
    return finish_column_sums<T>(sums, stream);
  }
  const Rows<false> rows{params.grad, params.row_stride, elements};
  allows_vectors(params, kLanes) ? start_column_sums<T, kLanes>(params.sums, rows, stream)
                                 : start_column_sums<T, 1>(params.sums, rows, stream);
  if (params.sums.slabs > 1) finish_column_sums<T>(params.sums, stream);
}

// The concatenation, which is written when it has been read.
struct Parts {
  static constexpr int kUnroll = 4;

  const LinearConcatenate params;

  template <typename T, int kLanes>
  __device__ __forceinline__ Vector<T, kLanes> fetch(int64_t row, int64_t column) const {
    const void* part = params.parts[0];
    int64_t columns = params.columns[0];
    int64_t first = 0;
    if (column >= columns) {
      first = columns;
      part = params.parts[1];
      columns = params.columns[1];
    }
    if (column >= first + columns) {
      first += columns;
      part = params.parts[2];
      columns = params.columns[2];
    }
    return load_vector<T, kLanes>(part, row * columns + column - first);
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ Values<T, kLanes> values(const Vector<T, kLanes>& fetched, int64_t row,
                                                      int64_t column) const {
    T* to = static_cast<T*>(params.output) + row * params.sums.columns + column;
    *reinterpret_cast<Vector<T, kLanes>*>(to) = fetched;
    return values_of(fetched);
  }
};

template <typename T>
void start(const LinearConcatenate& params, cudaStream_t stream) {
  start_column_sums<T, kLanesOf16Bytes<T>>(params.sums, Parts{params}, stream);
  if (params.sums.slabs > 1) finish_column_sums<T>(params.sums, stream);
}

template <typename Params>
LaunchStatus launch(const char* kernel, const Params& params, cudaStream_t stream) {
  if (params.sums.columns == 0) return {kernel, nullptr};
  for_kind(params.kind, [&](auto type) { start<typename decltype(type)::type>(params, stream); });
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_linear_bias_grad_cuda(
    const LinearBiasGrad* params, cudaStream_t stream) {
  return tch_extension::launch("linear_bias_grad", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_linear_concatenate_cuda(
    const LinearConcatenate* params, cudaStream_t stream) {
  return tch_extension::launch("linear_concatenate", *params, stream);
}
