// Products with up to 4 columns or up to 4 rows: sums of products along K, bound by memory, which
// tiles for tensor cores would mostly compute for nothing. Any row pitch and any address.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Whether one side is that short, and the other's operand has neighbours in memory.
bool skinny_product_can(const Product& product);

// Where it was measured to be.
bool skinny_product_is_faster(const Product& product);

LaunchStatus skinny_product(const Product& product, cudaStream_t stream);

}  // namespace tch_extension::gemm
