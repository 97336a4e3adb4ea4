// What src/ops/gemm asks for: a matrix product, a bias and perhaps a ReLU, of tensors as they
// lie in memory.
//
//   out[b, m, n] = relu?(Σ_k lhs[b, m, k] rhs[b, k, n] + bias[b, m, n])
#pragma once

#include <cstdint>

namespace tch_extension::gemm {

// In elements; 0 along what is broadcast.
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
  Matrices bias;  // [B, M, N]; no data where there is none
  void* out;      // [B, M, N], contiguous
  int32_t kind;   // TchExtensionKind of all
  int32_t relu;   // whether negative sums become 0; NaN stays
};

}  // namespace tch_extension::gemm
