// cuBLASLt's descriptors of a product.
#pragma once

#include <cublasLt.h>

#include "key.h"

namespace tch_extension::gemm {

// Plain data: nothing has to be destroyed when a thread, and with it its cache of plans, ends.
struct Descriptors {
  cublasLtHandle_t handle;
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t lhs;
  cublasLtMatrixLayoutOpaque_t rhs;
  cublasLtMatrixLayoutOpaque_t bias;
  cublasLtMatrixLayoutOpaque_t out;
};

// Throws cuBLASLt's message unless the status is success.
void check(cublasStatus_t status);

// The addresses of what an epilogue reads and writes.
struct Pointers {
  const void* bias;
  void* z;
};

// Fills in all fields except the handle.
void describe(const Key& key, const Pointers& pointers, Descriptors& descriptors);

// Sets the addresses of a product that was described with others.
void set_pointers(const Key& key, const Pointers& pointers, Descriptors& descriptors);

// The address of the factor 1 if `one`, otherwise of 0, in the type in which the product is scaled.
const void* factor(const Key& key, bool one);

}  // namespace tch_extension::gemm
