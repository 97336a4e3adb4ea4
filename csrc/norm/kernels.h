// The launchers of the ways, each defined in the header with its name and instantiated in a file of
// its own by each operator. They return false if the plan does not fit the arrays.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace tch_extension::norm {

template <typename Norm>
bool start_forward_registers(const NormForward& params, cudaStream_t stream);
template <typename Norm>
bool start_forward_shifted(const NormForward& params, cudaStream_t stream);
template <typename Norm>
bool start_forward_passes(const NormForward& params, cudaStream_t stream);
template <typename Norm>
bool start_backward_registers(const NormBackward& params, cudaStream_t stream);
template <typename Norm>
bool start_backward_ring(const NormBackward& params, cudaStream_t stream);
template <typename Norm>
bool start_backward_in_place(const NormBackward& params, cudaStream_t stream);
template <typename Norm>
bool start_backward_cluster(const NormBackward& params, cudaStream_t stream);
template <typename Norm>
bool start_backward_few(const NormBackward& params, cudaStream_t stream);
template <typename Norm>
bool start_backward_passes(const NormBackward& params, cudaStream_t stream);

// How many clusters of a backward plan the current device can run at a time; 0 if none.
template <typename Norm>
int64_t clusters_at_a_time(const NormPlan& plan, int32_t kind);

// Adds up the parts of the gradients of weight and bias.
bool start_finish(const NormBackward& params, cudaStream_t stream);

}  // namespace tch_extension::norm
