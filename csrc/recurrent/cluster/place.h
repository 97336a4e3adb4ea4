// What the forward and the backward pass of a cluster have in common: how a cluster shares a
// sequence, and the positions of a warp and its lanes. Only for code that is compiled for sm_90 and
// newer.
#pragma once

#include <type_traits>

#include "../../hopper/barrier.h"
#include "../../hopper/cluster.h"
#include "../../hopper/registers.h"
#include "../cells/activations.h"
#include "../tiles.h"
#include "params.h"

namespace tch_extension::recurrent::cluster {
namespace {

// A lane holds four sums of each gate. Four warps (the splits) share a tile's terms, and each of
// them finishes one of these sums for all lanes. In some kernels twice as many warps share the
// terms.
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
    // How many blocks a multiprocessor must have room for.
    kAtHome = kPadded <= 256 && kParts == kSplits ? 2 : 1,
  };
  static_assert(kParts == kSplits || kParts == 2 * kSplits,
                "sums of partial ones are made for these");
};

// The position of a warp and its lanes in a block of this many columns. A lane has four sums of
// each gate: two adjacent rows of the batch times two columns.
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
  int first_column;  // the warp's first column
};

// The product kind for a state of float where libtorch allows tf32. A value is multiplied as fp16,
// which has as many digits as tf32. Before, it is multiplied by a power of two of its row, which
// makes up for the smaller range of fp16. Each row of weights has its own power (`scales` of the
// parameters), and so has h.
struct ScaledHalf {};

// The type of the operands of a product of kind T, in memory and in tensor cores.
template <typename T>
using Operand = std::conditional_t<std::is_same_v<T, ScaledHalf>, __half, T>;

// Synchronizes the warps that share columns.
__device__ __forceinline__ void barrier_of_tile(const Place& place, int parts) {
  hopper::named_barrier_sync(1 + place.tile, parts * kWarp);
}

// How many terms of a sum one instruction adds.
constexpr int kDepth = 16;

// The first of the two adjacent terms that a part of the lane's operand `a` is for.
__device__ __forceinline__ int term_of(int part, int lane) { return lane % 4 * 2 + part / 2 * 8; }

// One part of the lane's operand `a`: two terms, which at(term) reads.
template <typename At>
__device__ __forceinline__ uint32_t operand(const At& at, int term) {
  return bits_of(at(term)) | bits_of(at(term + 1)) << 16;
}

}  // namespace
}  // namespace tch_extension::recurrent::cluster
