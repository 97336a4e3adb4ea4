// The launchers of the kernels of rows that are sums, which each operator instantiates in files of
// their own. They return false if the plan does not fit the arrays.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace tch_extension::norm {

template <typename Norm>
bool start_add_forward(const NormAddForward& params, cudaStream_t stream);
template <typename Norm>
bool start_add_backward(const NormAddBackward& params, cudaStream_t stream);

}  // namespace tch_extension::norm
