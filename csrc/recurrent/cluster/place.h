// How a cluster shares a sequence, and where a warp and its lanes are: what the forward and the
// backward pass of a cluster have in common. For code made for sm_90 and newer only.
#pragma once

#include <type_traits>

#include "../../hopper/barrier.h"
#include "../../hopper/cluster.h"
#include "../../hopper/registers.h"
#include "../cells/activations.h"
#include "../cells/lltm.h"
#include "../tiles.h"
#include "params.h"

namespace tch_extension::recurrent::cluster {
namespace {

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
}  // namespace tch_extension::recurrent::cluster
