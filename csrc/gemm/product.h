// What src/ops/gemm asks for: matrix products with an optional bias and ReLU (params.h has the
// description), of tensors in their own layouts, without a copy.
#pragma once

#include "params.h"

namespace tch_extension::gemm {

using Matrices = GemmMatrices;
using Product = GemmProduct;

}  // namespace tch_extension::gemm
