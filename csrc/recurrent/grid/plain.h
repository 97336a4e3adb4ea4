// The product of a block of the grid for float and double, which tensor cores for tf32 would round.
// The tensor cores for double do not, and multiply float as fast as anything else does. A product
// of two floats is exact in double. Each warp accumulates its partial sum in double and rounds it
// to T, in which the partial sums are added. The sums of a pair of columns without a tile are
// accumulated in T alone.
#pragma once

#include "../../hopper/convert.h"
#include "product.h"

namespace tch_extension::recurrent::grid {
namespace {

// Like HalfProduct, but each vector of 16 bytes is for one instruction and tile. kInRegisters
// fragments of weights are in registers, and the others in shared memory, [warp, fragment, half,
// lane] of 16 bytes. A pair of columns that is left over is multiplied by the lanes themselves,
// which have time for it while they wait for tensor cores.
template <typename Type, int kPairCount, int kVectorCount, int kHeld, int kInFlight, int kAtOnce>
struct PlainProduct : Messages<Type, kVectorCount, kInFlight, kAtOnce> {
  using T = Type;
  using Sum = T;
  using Base = Messages<Type, kVectorCount, kInFlight, kAtOnce>;
  using Base::first_term, Base::kRing, Base::kStride, Base::kVectors, Base::messages;
  enum : int {
    kIsPlain = true,
    kTiles = kPairCount % (kTile / 2) == 1 ? kPairCount / (kTile / 2)
                                           : (kPairCount - 1) / (kTile / 2) + 1,
    kHasPair = kPairCount > kTiles*(kTile / 2),
    kLanes = kLanesOf16Bytes<T>,  // terms of a lane per instruction
    kFragments = kVectors * kTiles,
    kInRegisters = kHeld,
    kShared = kFragments - kInRegisters,
    kBytesOfFragment = 2 * kWarp * 16,
    kBytesOfWeights = kWarps * kShared * kBytesOfFragment,
    // Sizes of partial sums, [warp, half of the rows, pair of columns, half of those rows] of four
    // values, with a gap between the halves that avoids bank conflicts.
    kBytesOfFour = 4 * static_cast<int>(sizeof(T)),
    kBytesOfPair = 2 * kBytesOfFour,
    kBytesOfRows = (kTiles * (kTile / 2) + kHasPair) * kBytesOfPair + 64,
    kBytesOfWarp = 2 * kBytesOfRows,
    kBytesOfIteration = kWarps * kBytesOfWarp,
  };

  explicit __device__ __forceinline__ PlainProduct(unsigned char* memory) {
    shared = memory + threadIdx.x / kWarp * (kShared * kBytesOfFragment) + threadIdx.x % kWarp * 16;
  }

  // Takes the weights from weight_of(pair, odd, term), for pairs of columns or of gates' rows.
  template <typename WeightOf>
  __device__ __forceinline__ void load_weights(const WeightOf& weight_of) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int pair = tile * (kTile / 2) + threadIdx.x % kWarp / 4;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
        for (int at = 0; at < kLanes; ++at) {
          const int term = first_term() + vector * kStride + at;
          put_weight(vector, tile, at, 0, weight_of(pair, 0, term));
          put_weight(vector, tile, at, 1, weight_of(pair, 1, term));
        }
        hopper::compiler_barrier();
      }
    }
    if constexpr (kHasPair) load_pair(weight_of);
  }

  // Loads the weights of the pair without a tile.
  template <typename WeightOf>
  __device__ __forceinline__ void load_pair(const WeightOf& weight_of) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
#pragma unroll
      for (int at = 0; at < kLanes; ++at) {
        const int term = first_term() + vector * kStride + at;
        of_pair[vector][0].lane[at] = weight_of(kTiles * (kTile / 2), 0, term);
        of_pair[vector][1].lane[at] = weight_of(kTiles * (kTile / 2), 1, term);
      }
    }
  }

  // Stores the weight for a term of a vector and for a tile's even or odd column. These columns are
  // the rows of the upper and of the lower half of the instruction's operand.
  __device__ __forceinline__ void put_weight(int vector, int tile, int term, int odd, T weight) {
    const int fragment = vector * kTiles + tile;
    if (fragment < kInRegisters) {
      weights[fragment][2 * term + odd] = weight;
    } else {
      const int of_lane = 2 * term + odd, half = of_lane / kLanes;
      auto* to =
          reinterpret_cast<T*>(shared + ((fragment - kInRegisters) * 2 + half) * (kWarp * 16));
      to[of_lane % kLanes] = weight;
    }
  }

  // Like Messages::multiply_each.
  __device__ __forceinline__ bool multiply(const Source<T>& here, const Source<T>& next,
                                           bool are_messages, bool ahead) {
#pragma unroll
    for (auto& tile : sums) {
      for (double& sum : tile) sum = 0;
    }
    sums_of_pair[0] = sums_of_pair[1] = 0;
    return Base::multiply_each(here, next, are_messages, ahead,
                               [&](int vector) { multiply_vector(vector); });
  }

  __device__ __forceinline__ void multiply_vector(int vector) {
    const uint4& words = messages[vector % kRing];
    T h[kLanes];
    if constexpr (kLanes == 4) {
      h[0] = __uint_as_float(words.x), h[1] = __uint_as_float(words.y);
      h[2] = __uint_as_float(words.z), h[3] = __uint_as_float(words.w);
    } else {
      h[0] = __hiloint2double(words.y, words.x), h[1] = __hiloint2double(words.w, words.z);
    }
    double b[kLanes];
#pragma unroll
    for (int at = 0; at < kLanes; ++at) b[at] = h[at];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int fragment = vector * kTiles + tile;
      double a[2 * kLanes];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Vector<T, kLanes> held;
        if (fragment < kInRegisters) {
#pragma unroll
          for (int at = 0; at < kLanes; ++at) held.lane[at] = weights[fragment][half * kLanes + at];
        } else {
          const int place = (fragment - kInRegisters) * 2 + half;
          held = *reinterpret_cast<const Vector<T, kLanes>*>(shared + place * (kWarp * 16));
        }
#pragma unroll
        for (int at = 0; at < kLanes; ++at)
          a[half * kLanes + at] = hopper::to_double(held.lane[at]);
      }
      hopper::warp_multiply_add(sums[tile], a, b);
    }
    if constexpr (kHasPair) {
#pragma unroll
      for (int at = 0; at < kLanes; ++at) {
        sums_of_pair[0] += of_pair[vector][0].lane[at] * h[at];
        sums_of_pair[1] += of_pair[vector][1].lane[at] * h[at];
      }
    }
  }

  // Like HalfProduct::write.
  __device__ __forceinline__ void write(unsigned char* partials) const {
    const int lane = threadIdx.x % kWarp;
    unsigned char* of_warp = partials + threadIdx.x / kWarp * kBytesOfWarp;
    unsigned char* to = of_warp + place_of(lane / 4, lane % 4 * 2);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto& sum = sums[tile];
      *reinterpret_cast<Vector<T, 4>*>(to + tile * (kTile / 2 * kBytesOfPair)) = {
          static_cast<T>(sum[0]), static_cast<T>(sum[2]), static_cast<T>(sum[1]),
          static_cast<T>(sum[3])};
    }
    if constexpr (kHasPair) write_pair(of_warp);
  }

  // A row's sum is the sum over four lanes; two of them write one value each.
  __device__ __forceinline__ void write_pair(unsigned char* of_warp) const {
    const int lane = threadIdx.x % kWarp, odd = lane % 2;
    T sum = odd ? sums_of_pair[1] : sums_of_pair[0];
    sum += __shfl_xor_sync(kAllLanes, odd ? sums_of_pair[0] : sums_of_pair[1], 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    if (lane % 4 < 2) {
      reinterpret_cast<T*>(of_warp + place_of(kTiles * (kTile / 2), lane / 4))[odd] = sum;
    }
  }

  static __device__ __forceinline__ int place_of(int pair, int row) {
    return row / 4 * kBytesOfRows + pair * kBytesOfPair + row / 2 % 2 * kBytesOfFour +
           row % 2 * (kBytesOfFour / 2);
  }

  T weights[kInRegisters > 0 ? kInRegisters : 1][2 * kLanes];
  unsigned char* shared;
  double sums[kTiles][4];
  Vector<T, kLanes> of_pair[kHasPair ? kVectors : 1][2];
  T sums_of_pair[2];
};

}  // namespace
}  // namespace tch_extension::recurrent::grid
