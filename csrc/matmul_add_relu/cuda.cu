// The kernels are memory-bound. The forward reads the product and writes the output; the backward
// reads the output and its gradient and writes the product's gradient. Both access 16 bytes per
// thread where sizes, strides and addresses allow. The bias is read by strides, mostly from a
// cache.

#include "matmul_add_relu.h"
#include "tch_extension/cuda_column_sums.h"

namespace tch_extension {
namespace {

// Loads adjacent values along the innermost dimension, which is contiguous or broadcast if there is
// more than one lane.
template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_strided(const void* pointer, int64_t at,
                                                          int64_t stride) {
  if constexpr (kLanes > 1) {
    if (stride == 0) return repeat_value<T, kLanes>(pointer, at);
  }
  return load_values<T, kLanes>(pointer, at);
}

// Index is 32 bits wide where the sizes allow it, because a 64-bit division costs more than the
// arithmetic.
template <typename T, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads)
    matmul_add_relu_forward_kernel(MatmulAddReluForward params) {
  const Index vectors_per_row = static_cast<Index>(params.size[0] / kLanes);
  Index vectors = vectors_per_row;
  for (int dim = 1; dim < params.dims; ++dim) vectors *= static_cast<Index>(params.size[dim]);
  for (Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<Index>(gridDim.x) * kThreads) {
    const int64_t column = static_cast<int64_t>(index % vectors_per_row) * kLanes;
    int64_t product_at = column * params.product_stride[0];
    int64_t bias_at = column * params.bias_stride[0];
    Index rest = index / vectors_per_row;
    for (int dim = 1; dim < params.dims; ++dim) {
      const Index size = static_cast<Index>(params.size[dim]);
      const int64_t place = static_cast<int64_t>(rest % size);
      rest /= size;
      product_at += place * params.product_stride[dim];
      bias_at += place * params.bias_stride[dim];
    }
    auto z = load_strided<T, kLanes>(params.product, product_at, params.product_stride[0]);
    const auto bias = load_strided<T, kLanes>(params.bias, bias_at, params.bias_stride[0]);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto sum = z.lane[lane] + bias.lane[lane];
      // max would not keep NaN.
      z.lane[lane] = sum < 0 ? 0 : sum;
    }
    store_values<T, kLanes>(params.out, static_cast<int64_t>(index) * kLanes, z);
  }
}

// Masks the gradient, stores the result and passes it on to be summed. If kFolded, the last row may
// be short.
template <bool kFolded>
struct Masked {
  // Two arrays are read, so unrolling further would leave registers for fewer threads.
  static constexpr int kUnroll = 2;

  const void* grad;
  const void* out;
  void* grad_product;
  int64_t columns;
  int64_t elements;

  template <typename T, int kLanes>
  struct Pair {
    Vector<T, kLanes> grad;
    Vector<T, kLanes> out;
  };

  template <typename T, int kLanes>
  __device__ __forceinline__ Pair<T, kLanes> fetch(int64_t row, int64_t column) const {
    const int64_t at = row * columns + column;
    if (kFolded && at + kLanes > elements) {
      return {load_part<T, kLanes>(grad, at, elements - at),
              load_part<T, kLanes>(out, at, elements - at)};
    }
    return {load_vector<T, kLanes>(grad, at), load_vector<T, kLanes>(out, at)};
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ Values<T, kLanes> values(const Pair<T, kLanes>& fetched, int64_t row,
                                                      int64_t column) const {
    auto masked = fetched.grad;
    const auto values = values_of(fetched.out);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      // The gradient is selected, not multiplied by 0, because NaN or infinity times 0 is NaN.
      if (values.lane[lane] <= 0) masked.lane[lane] = T(0);
    }
    const int64_t at = row * columns + column;
    T* const to = static_cast<T*>(grad_product) + at;
    if (kFolded && at + kLanes > elements) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (at + lane < elements) to[lane] = masked.lane[lane];
      }
    } else {
      *reinterpret_cast<Vector<T, kLanes>*>(to) = masked;
    }
    return values_of(masked);
  }
};

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) mask_kernel(Masked<false> masked, int64_t vectors) {
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<int64_t>(gridDim.x) * kThreads) {
    masked.values<T, kLanes>(masked.fetch<T, kLanes>(0, index * kLanes), 0, index * kLanes);
  }
}

int64_t elements(const MatmulAddReluForward& params) {
  int64_t elements = 1;
  for (int dim = 0; dim < params.dims; ++dim) elements *= params.size[dim];
  return elements;
}

int64_t elements(const MatmulAddReluBackward& params) {
  return params.sums.rows * params.sums.columns;
}

// Whether an operand can be read in whole vectors, or as single values that all lanes share.
bool allows_vectors(const void* pointer, const int64_t* stride, int dims, int lanes) {
  if (stride[0] == 0) return true;
  for (int dim = 1; dim < dims; ++dim) {
    if (stride[dim] % lanes != 0) return false;
  }
  return stride[0] == 1 && is_aligned_to_16(pointer);
}

bool allows_vectors(const MatmulAddReluForward& params, int lanes) {
  return params.size[0] % lanes == 0 && is_aligned_to_16(params.out) &&
         allows_vectors(params.product, params.product_stride, params.dims, lanes) &&
         allows_vectors(params.bias, params.bias_stride, params.dims, lanes);
}

bool allows_vectors(const MatmulAddReluBackward& params, int lanes) {
  const int64_t adjacent = params.sums.sums == nullptr ? elements(params) : params.sums.columns;
  return adjacent % lanes == 0 && is_aligned_to_16(params.grad) && is_aligned_to_16(params.out) &&
         is_aligned_to_16(params.grad_product);
}

template <typename T, int kLanes>
void start(const MatmulAddReluForward& params, cudaStream_t stream) {
  const int64_t all = elements(params);
  const unsigned int blocks = blocks_for(all / kLanes);
  // The loop adds the size of the grid to an index below the end; the sum must not overflow.
  if (all < INT32_MAX / 2) {
    matmul_add_relu_forward_kernel<T, kLanes, uint32_t><<<blocks, kThreads, 0, stream>>>(params);
  } else {
    matmul_add_relu_forward_kernel<T, kLanes, int64_t><<<blocks, kThreads, 0, stream>>>(params);
  }
}

template <typename T, int kLanes>
void start(const MatmulAddReluBackward& params, cudaStream_t stream) {
  const TchExtensionColumnSums& sums = params.sums;
  if (is_folded(sums)) {
    const Masked<true> masked{params.grad, params.out, params.grad_product,
                              sums.fold * sums.columns, elements(params)};
    return start_column_sums<T, kLanesOf16Bytes<T>>(sums, masked, stream);
  }
  const Masked<false> masked{params.grad, params.out, params.grad_product, sums.columns,
                             elements(params)};
  if (params.sums.sums != nullptr) return start_column_sums<T, kLanes>(params.sums, masked, stream);
  const int64_t vectors = elements(params) / kLanes;
  mask_kernel<T, kLanes><<<blocks_for(vectors), kThreads, 0, stream>>>(masked, vectors);
}

template <typename T>
void finish(const MatmulAddReluForward&, cudaStream_t) {}

template <typename T>
void finish(const MatmulAddReluBackward& params, cudaStream_t stream) {
  if (params.sums.sums != nullptr && (params.sums.slabs > 1 || is_folded(params.sums)))
    finish_column_sums<T>(params.sums, stream);
}

bool is_empty(const MatmulAddReluForward& params) { return elements(params) == 0; }

// Without rows the sums are zeros, which still have to be written.
bool is_empty(const MatmulAddReluBackward& params) {
  return params.sums.sums == nullptr ? elements(params) == 0 : params.sums.columns == 0;
}

template <typename Params>
LaunchStatus launch(const char* kernel, const Params& params, cudaStream_t stream) {
  if (is_empty(params)) return {kernel, nullptr};
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kLanes = kLanesOf16Bytes<T>;
    allows_vectors(params, kLanes) ? start<T, kLanes>(params, stream) : start<T, 1>(params, stream);
    finish<T>(params, stream);
  });
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_matmul_add_relu_forward_cuda(
    const MatmulAddReluForward* params, cudaStream_t stream) {
  return tch_extension::launch("matmul_add_relu_forward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_matmul_add_relu_backward_cuda(
    const MatmulAddReluBackward* params, cudaStream_t stream) {
  return tch_extension::launch("matmul_add_relu_backward", *params, stream);
}
