// A matrix product with what comes behind it, as one call of cuBLASLt.
//
// cuBLASLt counts columns first: to it, out is the N×M product of rhs' and lhs' transposes, and a
// bias for each column is the vector that its epilogue adds. A bias of full shape is its matrix C,
// which it reads while it writes out. What it needs to know of a product, the choice of a kernel
// included, is kept as a plan.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "product.h"

namespace tch_extension::gemm {

// On the current device, whose number is `device`. False, if cuBLASLt has no way to compute it, or
// none that keeps NaN; then nothing was started.
bool run_plan(const Product& product, int32_t device, cudaStream_t stream);

// What this thread's cache of plans did so far.
GemmCounters counters();

}  // namespace tch_extension::gemm
