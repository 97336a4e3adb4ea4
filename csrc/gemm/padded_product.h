// Products whose rows do not begin at multiples of 16 bytes, for which there are only slow
// tensor-core kernels. The factors are copied to padded rows, a plan multiplies the copies, and
// another kernel removes the padding of the output.
#pragma once

#include <cuda_runtime_api.h>

#include "product.h"

namespace tch_extension::gemm {

// Whether there is anything to pad, and the layouts of the operands are supported here.
bool padded_product_can(const Product& product);

// Whether the product is estimated to save more time than the copies take. Call it before
// padded_product_can: it rules out most products by their kind and sizes.
bool padded_product_is_faster(const Product& product, bool is_tf32);

// False if cuBLASLt cannot compute the padded product; then the output is not written.
bool padded_product(const Product& product, int32_t device, cudaStream_t stream);

}  // namespace tch_extension::gemm
