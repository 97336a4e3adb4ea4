// What the persistent kernels are made of: waiting for bytes from other blocks of a cluster,
// sending them, and tiles of weights that stay on chip. For code made for sm_90 and newer only.
#pragma once

#include <type_traits>

#include "../hopper/async_copy.h"
#include "../hopper/barrier.h"
#include "../hopper/cluster.h"
#include "../hopper/mma.h"
#include "../hopper/registers.h"
#include "float_functions.h"
#include "persistent.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {
namespace {

constexpr int kGates = 3;

// Rows of the batch that a cluster computes: as many as the product's instruction has columns.
constexpr int kRows = 8;

// Columns of h that a warp computes
constexpr int kTile = 16;

// Sums of a gate that a lane holds, and warps that finish a tile's columns, each of them one of
// these sums. They share the terms; in some kernels as many others do so, too.
constexpr int kSplits = 4;

// How a cluster shares H' columns, at compile time.
template <int kPaddedSize, int kBlocks, int kWarpsOfTile = kSplits>
struct Shares {
  enum : int {
    kParts = kWarpsOfTile,
    kPadded = kPaddedSize,
    kCluster = kBlocks,
    kColumns = kPadded / kCluster,
    kTiles = kColumns / kTile,
    kThreads = kTiles * kParts * kWarp,
    // Blocks that a multiprocessor is to have room for.
    kAtHome = kPadded <= 256 && kParts == kSplits ? 2 : 1,
  };
  static_assert(kParts == kSplits || kParts == 2 * kSplits,
                "sums of partial ones are made for these");
};

// Where a warp and its lanes are, in a block of so many columns. A lane has four sums of each gate:
// of two neighbouring rows of the batch, each for two columns.
struct Place {
  explicit __device__ Place(int columns, int parts = kSplits) {
    lane = threadIdx.x % kWarp;
    split = threadIdx.x / kWarp % parts;
    tile = threadIdx.x / kWarp / parts;
    rank = hopper::cluster_rank();
    first_column = rank * columns + tile * kTile;
  }
  __device__ int warp() const { return tile * kSplits + split; }

  int lane, split, tile;
  uint32_t rank;
  int first_column;  // of the warp
};

// A float where libtorch allows tf32: multiplied as a half, which has as many digits, with a power
// of two for its row, and so for any size. A row of weights has its own (`scales` of the
// parameters), h another.
struct ScaledHalf {};

// What is multiplied as T, in memory and by tensor cores.
template <typename T>
using Operand = std::conditional_t<std::is_same_v<T, ScaledHalf>, __half, T>;

// Of the warps that share columns.
__device__ __forceinline__ void barrier_of_tile(const Place& place, int parts) {
  hopper::named_barrier_sync(1 + place.tile, parts * kWarp);
}

// In the precision that a half kind or tf32 can show, and quickly; for float in its own, for double
// exactly. T is what is multiplied.
template <typename T, typename G>
struct Activation {
  static __device__ __forceinline__ G of_gate(G x) { return sigmoid(x); }
  static __device__ __forceinline__ G of_candidate(G x) { return elu(x); }
  static __device__ __forceinline__ G candidate_grad(G x) { return elu_grad(x); }
  static __device__ __forceinline__ G of_c(G x) { return std::tanh(x); }
};

template <typename T>
struct Activation<T, float> {
  static __device__ __forceinline__ float of_gate(float x) {
    if constexpr (std::is_same_v<T, float>) return float_sigmoid(x);
    return hopper::fast_reciprocal(1.0f + hopper::fast_exp(-x));
  }

  static __device__ __forceinline__ float of_candidate(float x) {
    if constexpr (std::is_same_v<T, float>) return float_elu(x);
    // exp(x) - 1 loses its digits near 0, where few terms of the series are enough.
    float series = 1.0f / 120 * x + 1.0f / 24;
    series = series * x + 1.0f / 6;
    series = series * x + 0.5f;
    series = series * x * x + x;
    const float negative = x > -0.25f ? series : hopper::fast_exp(x) - 1.0f;
    return x > 0 ? x : negative;
  }

  static __device__ __forceinline__ float candidate_grad(float x) {
    if constexpr (std::is_same_v<T, float>) return elu_grad(x);
    return x > 0 ? 1.0f : hopper::fast_exp(x);
  }

  static __device__ __forceinline__ float of_c(float x) {
    if constexpr (std::is_same_v<T, float>) return float_tanh(x);
    // As above, and without a branch.
    const float square = x * x;
    float series = -17.0f / 315 * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = series * square * x + x;
    const float other = 1.0f - 2.0f * hopper::fast_reciprocal(1.0f + hopper::fast_exp(2 * x));
    return fabsf(x) < 0.25f ? series : other;
  }
};

__device__ __forceinline__ uint32_t bits_of(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 value) {
  return __bfloat16_as_ushort(value);
}

// Columns of a row that four lanes take with 16 bytes each.
template <typename T>
constexpr int kSpan = 4 * kLanesOf16Bytes<T>;

// Terms of a sum that one instruction adds.
constexpr int kDepth = 16;

// Which term the lane's part of `a` is for, of those of a product; with the one behind.
__device__ __forceinline__ int term_of(int part, int lane) { return lane % 4 * 2 + part / 2 * 8; }

// The lane's part of `a`, from at(term).
template <typename At>
__device__ __forceinline__ uint32_t operand(const At& at, int term) {
  return bits_of(at(term)) | bits_of(at(term + 1)) << 16;
}

}  // namespace
}  // namespace tch_extension
