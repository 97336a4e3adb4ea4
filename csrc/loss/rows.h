// The ways in which the kernels compute rows.
#pragma once

#include "loss.h"
#include "row.h"

namespace tch_extension::loss {

// Starts a kernel that reads rows once, whatever their length, as far as it fits in the shared
// memory of eight multiprocessors. Starts nothing, and returns false, if the current device is no
// Hopper.
bool start_rows_in_shared_memory(const LossRows& params, cudaStream_t stream);

namespace {

// Writes the gradient of a row without a loss, from class `begin` on to class `end`; what of this
// is outside of the row is left out.
template <typename Row>
__device__ __forceinline__ void write_zeros(const Row& row, int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > row.params.classes) end = row.params.classes;
  for (int64_t at = begin + threadIdx.x; at < end; at += blockDim.x) row.gradients[at] = 0.0f;
}

}  // namespace
}  // namespace tch_extension::loss
