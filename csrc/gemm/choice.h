// Chooses the cuBLASLt algorithm for a product, by rules that were fitted to measurements at random
// sizes (docs/lab/matmul_add_relu.md).
#pragma once

#include <optional>

#include "descriptors.h"

namespace tch_extension::gemm {

struct Choice {
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
  bool relu_after;  // the ReLU is left to a kernel of ours after the product
};

// Chooses an algorithm and describes the product for it in `descriptors`. Looks at sizes and
// strides only. The result is empty if cuBLASLt has no suitable algorithm.
std::optional<Choice> choose(const Key& key, const Pointers& pointers, Descriptors& descriptors);

}  // namespace tch_extension::gemm
