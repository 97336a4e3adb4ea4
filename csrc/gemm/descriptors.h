// A product as cuBLASLt is told of it.
#pragma once

#include <cublasLt.h>

#include "key.h"

namespace tch_extension::gemm {

// Plain data: nothing has to be destroyed, whenever a thread ends.
struct Descriptors {
  cublasLtHandle_t handle;
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t lhs;
  cublasLtMatrixLayoutOpaque_t rhs;
  cublasLtMatrixLayoutOpaque_t bias;
  cublasLtMatrixLayoutOpaque_t out;
};

// Throws what cuBLASLt says.
void check(cublasStatus_t status);

// All but the handle.
void describe(const Key& key, const void* bias, Descriptors& descriptors);

void set_bias(Descriptors& descriptors, const void* bias);

// 0 or 1, in the type that the product is scaled in.
const void* factor(const Key& key, bool one);

}  // namespace tch_extension::gemm
