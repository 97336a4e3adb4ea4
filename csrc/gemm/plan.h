// A matrix product, its bias, its ReLU or another epilogue as one call of cuBLASLt.
//
// cuBLASLt's matrices are column-major: to cuBLASLt, out is the N×M product of the transposes of
// rhs and lhs, and a bias with one value per column is the vector that its epilogue adds. A bias of
// full shape is passed as the matrix C, which cuBLASLt reads while it writes out. Everything that
// cuBLASLt needs to know about a product, including the chosen algorithm, is kept as a plan.
#pragma once

#include <cuda_runtime_api.h>

#include "params.h"
#include "product.h"

namespace tch_extension::gemm {

// Runs on the current device, whose index is `device`. False if cuBLASLt cannot compute the
// product, or not in a way that keeps NaN; then nothing was launched.
bool run_plan(const Product& product, int32_t device, cudaStream_t stream,
              const Epilogue& epilogue = {});

// The counters of this thread's cache of plans.
GemmCounters counters();

}  // namespace tch_extension::gemm
