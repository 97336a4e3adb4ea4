// Products whose rows do not begin at multiples of 16 bytes, for which there are only slow
// tensor-core kernels. The factors are copied to padded rows, a plan multiplies the copies, and
// another kernel removes the padding of the output.
#pragma once

#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Throws if the launch failed; otherwise returns true.
inline bool started(const LaunchStatus& status) {
  TORCH_CHECK(status.error == nullptr, status.kernel, ": ", status.error);
  return true;
}

// What would be copied; empty if there is nothing to pad, or the layouts of the operands or the
// sizes are not supported here.
std::optional<GemmPadding> padding_facts(const Product& product);

// False if cuBLASLt cannot compute the padded product; then the output is not written.
bool padded_product(const Product& product, int32_t device, cudaStream_t stream);

}  // namespace tch_extension::gemm
