// Shared by the kernels for narrow products: the operands, with the rows of the long factor as the
// rows of the output.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::gemm {

constexpr int kMostShort = 4;
// By tensor cores.
constexpr int kMostShortByTensor = 8;

// How the short factor is read: value by value, in vectors like those of the long factor, or in
// such vectors from a copy in shared memory.
enum class Few : int32_t { kSingle, kWhole, kCopied };

// The product or its transpose: out[r, s] = Σ_k many[r, k] few[s, k] + bias[r, s].
struct Skinny {
  struct Factor {
    const void* data;
    int64_t row;
    int64_t inner;
    int64_t batch;
  };
  Factor many;
  Factor few;
  Factor bias;
  Factor out;
  int64_t rows;
  int64_t inner;
  int32_t shorts;
  int32_t relu;
  Few few_is;
};

template <typename T>
__device__ __forceinline__ const T* of_batch(const Skinny::Factor& factor) {
  return static_cast<const T*>(factor.data) + blockIdx.z * factor.batch;
}

template <typename T>
__device__ __forceinline__ Compute<T> bias_of(const Skinny& skinny, int64_t row, int s) {
  const auto& [data, bias_row, bias_short, bias_batch] = skinny.bias;
  if (data == nullptr) return 0;
  return static_cast<Compute<T>>(of_batch<T>(skinny.bias)[row * bias_row + s * bias_short]);
}

template <typename T>
__device__ __forceinline__ void finish(const Skinny& skinny, int64_t row, int s, Compute<T> sum) {
  // Not max(), which would turn NaN into 0.
  if (skinny.relu && sum < 0) sum = 0;
  T* out = const_cast<T*>(of_batch<T>(skinny.out));
  out[row * skinny.out.row + s * skinny.out.inner] = static_cast<T>(sum);
}

template <typename T>
bool is_even(const Skinny::Factor& factor, int64_t stride, int lanes = kLanesOf16Bytes<T>) {
  return reinterpret_cast<uintptr_t>(factor.data) % (lanes * sizeof(T)) == 0 &&
         stride % lanes == 0 && factor.batch % lanes == 0;
}

// The intended number of vectors of K per thread. A thread has fewer than twice as many, except in
// the largest team.
constexpr int64_t kSteps = 8;

// Starts the kernel for a long factor whose row stride is 1.
void start_skinny_columns(const Skinny& skinny, int32_t kind, int64_t batch, cudaStream_t stream);

// Products of one short factor that are computed together.
constexpr int kMostTogether = 3;

struct SkinnyGroup {
  Skinny each[kMostTogether];
  int32_t count;
  // Whether the output is silu(each[0]) each[1], which have as many rows; it is that of each[0].
  int32_t is_gated;
  // The weight `[K]` of an RMS norm of the short factor, of kind bfloat16; null if there is none.
  const void* norm_weight;
  float norm_eps;
};

// Whether tensor cores compute it: half kinds whose rows of both factors can be read in 16 bytes.
bool is_for_tensor_cores(const Skinny& skinny, int32_t kind);
void start_skinny_tensor(const SkinnyGroup& group, int32_t kind, int64_t batch,
                         cudaStream_t stream);

}  // namespace tch_extension::gemm
