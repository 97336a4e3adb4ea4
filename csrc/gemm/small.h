// Products so small that blocks without tensor cores, each for a 16×16 tile of the output, finish
// before cuBLASLt's kernels have filled their pipelines. Operands may have any strides.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Whether the sizes are within the limits of the grid and of 32-bit indices.
bool small_product_can(const Product& product);

LaunchStatus small_product(const Product& product, cudaStream_t stream);

}  // namespace tch_extension::gemm
