// Products whose rows do not begin at multiples of 16 bytes, for which tensor cores have slow
// kernels only: with padded copies of the factors, a plan for those, and a pass that brings the
// output together.
#pragma once

#include <cuda_runtime_api.h>

#include "product.h"

namespace tch_extension::gemm {

// Whether there is anything to pad, and the operands lie in a way that is known here.
bool padded_product_can(const Product& product);

// By a rule of what is saved and what copies cost. To be asked first: it looks at sizes only.
bool padded_product_is_faster(const Product& product, bool is_tf32);

// False, if cuBLASLt has no way to compute it; then there is no output.
bool padded_product(const Product& product, int32_t device, cudaStream_t stream);

}  // namespace tch_extension::gemm
