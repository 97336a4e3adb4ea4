// How the backward of the grid multiplies halves where libtorch allows tf32 (scale_rows.h): the gradients for
// all gates have any range, and so each row of a tile's goes with a power of two of its own.
//
// The messages of a step's kRows rows, in an order in which a warp reads what lies side by side: for each
// pair of neighbouring tiles three vectors, of a gate each, [row, lane of four, tile, four columns], and the
// scales, [lane of four, tile, row of two]. All of it is sent, also for rows and columns that there are not.
#pragma once

#include "grid_product.h"

namespace tch_extension {
namespace {

// Of messages and scales, for each pair of tiles.
constexpr int kVectorsOfPair = kGates;
constexpr int kBytesOfVector = kWarp * 16;
constexpr int kBytesOfPair = kVectorsOfPair * kBytesOfVector;
constexpr int kBytesOfScales = 4 * 16;

// Where the messages of sub-batches are.
struct ScaledLayout {
  template <typename Params>
  explicit __device__ __forceinline__ ScaledLayout(const Params& params)
      : messages(static_cast<unsigned char*>(params.exchange)),
        scales(reinterpret_cast<unsigned char*>(params.exchange_scales)),
        subs((static_cast<int>(params.batch) + kRows - 1) / kRows),
        pairs((static_cast<int>(params.hidden) + 2 * kTile - 1) / (2 * kTile)) {}

  // Counted from the first of all steps' sub-batches.
  __device__ __forceinline__ int64_t first_pair(int step, int first_row) const {
    return static_cast<int64_t>(step * subs + first_row / kRows) * pairs;
  }

  unsigned char* messages;
  unsigned char* scales;
  int subs;  // of all groups of blocks
  int pairs;
};

// What a lane multiplies in a turn.
struct ScaledSource {
  const unsigned char* messages;
  const unsigned char* scales;
  int pairs;  // from there on; none where nothing is sent
};

// A warp's terms are all gates of every kWarps-th pair of tiles. The sums of a tile's terms are multiplied
// with its scales before they meet others.
template <int kTileCount, int kVectorCount, int kInShared, int kInFlight, int kAtOnce>
struct GridProductScaled : GridProduct<__half, kTileCount, kVectorCount, kInShared, kInFlight, kAtOnce> {
  using Base = GridProduct<__half, kTileCount, kVectorCount, kInShared, kInFlight, kAtOnce>;
  using Base::kChains, Base::kGroup, Base::kRing, Base::kTiles, Base::kVectors, Base::messages, Base::sums;
  static constexpr int kPairsInFlight = kRing / kVectorsOfPair;
  static_assert(kGroup % kVectorsOfPair == 0, "pairs are waited for as a whole");

  using Base::Base;

  // Of the first pair's.
  static __device__ __forceinline__ ScaledSource source(const ScaledLayout& layout, int64_t first_pair,
                                                        bool is_sent) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t pair = is_sent ? first_pair + warp : 0;
    return {layout.messages + pair * kBytesOfPair + lane * 16,
            layout.scales + pair * kBytesOfScales + lane % 4 * 16, is_sent ? layout.pairs - warp : 0};
  }

  // The first of the two terms of a word.
  static __device__ __forceinline__ int column_of(int vector, int tile_of_pair, int word) {
    const int pair = vector / kVectorsOfPair * kWarps + threadIdx.x / kWarp;
    return (pair * 2 + tile_of_pair) * kTile + threadIdx.x % 4 * 4 + word * 2;
  }
  static __device__ __forceinline__ int gate_of(int vector) { return vector % kVectorsOfPair; }

  __device__ __forceinline__ void load(const ScaledSource& source, int vector) {
    const int pair = vector / kVectorsOfPair * kWarps, of_pair = vector % kVectorsOfPair;
    const bool is_sent = pair < source.pairs;
    const unsigned char* from = source.messages + pair * kBytesOfPair + of_pair * kBytesOfVector;
    messages[vector % kRing] = is_sent ? load_message(from) : uint4{};
  }

  __device__ __forceinline__ void load_scales(const ScaledSource& source, int pair) {
    const bool is_sent = pair * kWarps < source.pairs;
    const unsigned char* from = source.scales + pair * (kWarps * kBytesOfScales);
    scales[pair % kPairsInFlight] = is_sent ? load_message(from) : uint4{};
  }

  __device__ __forceinline__ void load_pair(const ScaledSource& source, int pair) {
    load_scales(source, pair);
#pragma unroll
    for (int gate = 0; gate < kVectorsOfPair; ++gate) load(source, pair * kVectorsOfPair + gate);
  }

  __device__ __forceinline__ void begin(const ScaledSource& source) {
#pragma unroll
    for (int pair = 0; pair < kPairsInFlight; ++pair) load_pair(source, pair);
  }

  __device__ __forceinline__ bool is_missing(int first) const {
    bool missing = false;
#pragma unroll
    for (int pair = first / kVectorsOfPair; pair < (first + kGroup) / kVectorsOfPair; ++pair) {
      missing |= is_unsent(scales[pair % kPairsInFlight]);
    }
    return __any_sync(~0u, missing) || Base::is_missing(first);
  }

  __device__ __forceinline__ void wait(const ScaledSource& source, int first) {
    while (is_missing(first)) {
#pragma unroll
      for (int vector = first; vector < first + kRing && vector < kVectors; ++vector) {
        if (is_unsent(messages[vector % kRing])) load(source, vector);
        const int pair = vector / kVectorsOfPair;
        if (vector % kVectorsOfPair == 0 && is_unsent(scales[pair % kPairsInFlight])) {
          load_scales(source, pair);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply(const ScaledSource& here, const ScaledSource& next, bool,
                                           bool ahead) {
    constexpr int kPairs = kVectors / kVectorsOfPair, kOfGroup = kGroup / kVectorsOfPair;
    this->begin_sums();
#pragma unroll
    for (int first = 0; first < kPairs; first += kOfGroup) {
      wait(here, first * kVectorsOfPair);
#pragma unroll
      for (int pair = first; pair < first + kOfGroup; ++pair) multiply_pair(pair);
#pragma unroll
      for (int pair = first + kPairsInFlight; pair < first + kPairsInFlight + kOfGroup; ++pair) {
        if (pair < kPairs) {
          load_pair(here, pair);
        } else if (ahead) {
          load_pair(next, pair - kPairs);
        }
      }
    }
  }

  __device__ __forceinline__ void multiply_pair(int pair) {
    float parts[2][kTiles][4] = {};
#pragma unroll
    for (int gate = 0; gate < kVectorsOfPair; ++gate) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          this->multiply_one(parts[half][tile], pair * kVectorsOfPair + gate, half, tile);
        }
      }
    }
    const uint4 of_pair = scales[pair % kPairsInFlight];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float even = __uint_as_float(half == 0 ? of_pair.x : of_pair.z);
      const float odd = __uint_as_float(half == 0 ? of_pair.y : of_pair.w);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        auto& sum = sums[(pair * 2 + half) % kChains][tile];
#pragma unroll
        for (int of = 0; of < 4; ++of) sum[of] += parts[half][tile][of] * (of % 2 == 0 ? even : odd);
      }
    }
  }

  uint4 scales[kPairsInFlight];
};

// A power of two that takes finite values up to `largest` (its bits) below 2^15, and its inverse; both are
// normal, and neither is what is unsent.
struct MessageScale {
  explicit __device__ __forceinline__ MessageScale(uint32_t largest) {
    constexpr uint32_t kExponent = 0x7f800000, kBias = 127, kDigits = 23, kTop = 14, kLeast = 15;
    const uint32_t exponent = max(largest & kExponent, kLeast << kDigits);
    there = __uint_as_float(((2 * kBias + kTop) << kDigits) - exponent);
    back = __uint_as_float(exponent - (kTop << kDigits));
  }
  float there, back;
};

// The place of a lane's two columns of a row in the messages of a turn.
struct ScaledTarget {
  // Of a pair of tiles that begins with the column of two tiles.
  __device__ __forceinline__ ScaledTarget(const ScaledLayout& layout, int64_t first_pair, int row, int column)
      : pair(first_pair + column / (2 * kTile)),
        half(column / kTile % 2),
        scale(reinterpret_cast<float*>(layout.scales + pair * kBytesOfScales + row / 2 * 16 + half * 8 +
                                       row % 2 * 4)),
        words(layout.messages + pair * kBytesOfPair + row * 64 + column % kTile / 4 * 16 + half * 8 +
              column % 4 * 2) {}

  __device__ __forceinline__ __half* of_gate(int gate) const {
    return reinterpret_cast<__half*>(words + gate * kBytesOfVector);
  }

  int64_t pair;
  int half;
  float* scale;
  unsigned char* words;
};

__device__ __forceinline__ void send_scale(float* to, float scale) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(__float_as_uint(scale)) : "memory");
}

// The largest finite magnitude of the columns of a row, as bits.
__device__ __forceinline__ uint32_t largest_of_row(const float (&values)[kGates][2]) {
  constexpr uint32_t kMagnitude = 0x7fffffff, kInfinite = 0x7f800000;
  uint32_t largest = 0;
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t magnitude = __float_as_uint(values[gate][odd]) & kMagnitude;
      largest = max(largest, magnitude < kInfinite ? magnitude : 0);
    }
  }
#pragma unroll
  for (int apart = 4; apart < kWarp; apart *= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, apart));
  }
  return largest;
}

}  // namespace
}  // namespace tch_extension
