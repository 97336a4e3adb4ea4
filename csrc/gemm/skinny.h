// Products with up to 4 columns or up to 4 rows. They are bound by memory bandwidth, and most of a
// tensor core's tile would be wasted on them. Operands may have any row stride and any address.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Whether M or N is that small, and the other side's operand is contiguous in one dimension.
bool skinny_product_can(const Product& product);

// How these kernels would read a product that they can compute.
GemmSkinny skinny_facts(const Product& product);

LaunchStatus skinny_product(const Product& product, cudaStream_t stream);

}  // namespace tch_extension::gemm
