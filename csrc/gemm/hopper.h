// relu(lhs rhs + bias) with a bias of full shape, in half precision, for GPUs of compute capability
// 9.0. The bias of one tile is read while another tile is multiplied, which cuBLASLt's kernels do
// not do.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Whether this is such a product, bulk copies support its addresses and strides, and the kernel was
// compiled for the current device.
bool hopper_product_can(const Product& product);

// False if the driver cannot make tensor maps for these matrices; then nothing was launched.
bool hopper_product(const Product& product, cudaStream_t stream, LaunchStatus& status);

}  // namespace tch_extension::gemm
