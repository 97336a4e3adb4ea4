// What src/ops/gemm asks for: matrix products with an optional bias and ReLU (params.h has the
// description), of tensors in their own layouts, without a copy.
#pragma once

#include "params.h"

namespace tch_extension::gemm {

using Matrices = GemmMatrices;
using Product = GemmProduct;

// An epilogue besides the bias and the ReLU.
struct Epilogue {
  // Whether out is gelu(z) of z = lhs rhs + bias, with tanh.
  bool gelu = false;
  // Where z is written, [M, N], contiguous; null if nobody needs it.
  void* z = nullptr;
};

}  // namespace tch_extension::gemm
