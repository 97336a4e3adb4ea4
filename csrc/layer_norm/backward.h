// What the backward's kernels share.
#pragma once

#include "row_team.h"

namespace tch_extension {
namespace {

// A row's mean and rstd. Only the bias' gradient can do without.
template <typename C>
__device__ __forceinline__ Pair<C> kept_moments(const LayerNormBackward& params, int64_t row) {
  if (params.mean == nullptr) return {C(0), C(0)};
  return {static_cast<const C*>(params.mean)[row], static_cast<const C*>(params.rstd)[row]};
}

// Null counts as aligned.
inline bool aligned(const LayerNormBackward& params) {
  return is_aligned_to_16(params.grad_output) && is_aligned_to_16(params.input) &&
         is_aligned_to_16(params.weight) && is_aligned_to_16(params.grad_input);
}

}  // namespace
}  // namespace tch_extension
