// What src/ops/gemm asks for: a matrix product with an optional bias and ReLU, of tensors in their
// own layouts, without a copy.
//
//   out[b, m, n] = relu?(Σ_k lhs[b, m, k] rhs[b, k, n] + bias[b, m, n])
#pragma once

#include <cstdint>

namespace tch_extension::gemm {

// A batch of matrices with strides in elements. A stride is 0 along a dimension that is broadcast.
struct Matrices {
  const void* data;
  int64_t row;
  int64_t column;
  int64_t batch;
};

struct Product {
  int64_t batch;  // B
  int64_t m;
  int64_t n;
  int64_t k;
  Matrices lhs;   // [B, M, K]
  Matrices rhs;   // [B, K, N]
  Matrices bias;  // [B, M, N]; its data is null if there is no bias
  void* out;      // [B, M, N], contiguous
  int32_t kind;   // TchExtensionKind of all matrices
  int32_t relu;   // whether negative sums become 0; NaN stays NaN
};

}  // namespace tch_extension::gemm
