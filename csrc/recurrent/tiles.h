// The tiles in which the kernels that keep W_h on the chip multiply. Their products are W_h, a tile
// at a time, times hᵀ, whose columns are the rows of the batch.
#pragma once

#include "tch_extension/launch.h"

namespace tch_extension::recurrent {
namespace {

// How many rows of the batch are computed at a time: as many as the mma instruction has columns.
constexpr int kRows = 8;

// For how many columns of h a warp multiplies at a time: as many as the mma instruction has rows.
constexpr int kTile = 16;

__device__ __forceinline__ uint32_t bits_of(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 value) {
  return __bfloat16_as_ushort(value);
}

// How many columns of a row four lanes load with 16 bytes each.
template <typename T>
constexpr int kSpan = 4 * kLanesOf16Bytes<T>;

}  // namespace
}  // namespace tch_extension::recurrent
