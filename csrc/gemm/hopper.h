// relu(lhs rhs + bias) with a bias of full shape in the half kinds, for GPUs of capability 9.0: the
// bias of a tile is read while another is multiplied, which cuBLASLt's kernels do not do.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Whether this is such a product, its matrices lie where bulk copies can reach them, and the code
// for the current device has the kernel.
bool hopper_product_can(const Product& product);

// Where it was measured to be. To be asked first: it looks at sizes only.
bool hopper_product_is_faster(const Product& product);

// False, if the driver makes no description of these matrices: then nothing was started.
bool hopper_product(const Product& product, cudaStream_t stream, LaunchStatus& status);

}  // namespace tch_extension::gemm
