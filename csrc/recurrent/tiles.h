// The tiles in which the kernels that keep W_h on the chip multiply. Their products have the batch
// as columns: W_h, a tile at a time, times hᵀ.
#pragma once

#include "tch_extension/launch.h"

namespace tch_extension::recurrent {
namespace {

// Rows of the batch that are computed at a time: as many as the instruction mma has columns.
constexpr int kRows = 8;

// Columns of h for which a warp multiplies at a time: as many as the instruction has rows.
constexpr int kTile = 16;

__device__ __forceinline__ uint32_t bits_of(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 value) {
  return __bfloat16_as_ushort(value);
}

// Columns of a row that four lanes load with 16 bytes each.
template <typename T>
constexpr int kSpan = 4 * kLanesOf16Bytes<T>;

}  // namespace
}  // namespace tch_extension::recurrent
