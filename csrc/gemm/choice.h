// Which of cuBLASLt's kernels computes a product: rules that were fitted to random sizes
// (docs/lab/matmul_add_relu.md).
#pragma once

#include <optional>

#include "descriptors.h"

namespace tch_extension::gemm {

struct Choice {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
  bool relu_behind;  // the ReLU is left to a pass of ours
};

// None, if there is none. Looks at sizes and strides only. What it chose is described.
std::optional<Choice> choose(const Key& key, const void* bias, Descriptors& descriptors);

}  // namespace tch_extension::gemm
