// Products so small that one block for each 16×16 of the output, without tensor cores, is done
// before cuBLASLt's kernels have filled their pipelines. Any strides.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Whether the grid can be as large as this needs.
bool small_product_can(const Product& product);

// Where it was measured to be.
bool small_product_is_faster(const Product& product);

LaunchStatus small_product(const Product& product, cudaStream_t stream);

}  // namespace tch_extension::gemm
