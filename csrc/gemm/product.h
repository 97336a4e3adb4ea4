// What src/ops/gemm asks for: matrix products with an optional bias and ReLU (params.h has the
// description), of tensors in their own layouts, without a copy.
#pragma once

#include "params.h"

namespace tch_extension::gemm {

using Matrices = GemmMatrices;
using Product = GemmProduct;

// What an epilogue reads and writes besides the product, the bias and the output.
struct Extra {
  GemmEpilogue epilogue = GemmEpilogue::None;
  // z, [M, N], contiguous: written by Gelu unless it is null, and read by GeluGrad.
  void* aux = nullptr;
  // Written by LhsSums ([M]), and by GeluGrad ([N]) unless it is null.
  void* sums = nullptr;
};

}  // namespace tch_extension::gemm
