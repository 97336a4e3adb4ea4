// How the backward pass of the grid multiplies fp16 values where libtorch allows tf32
// (scale_rows.h). Gradients for the gates may have any magnitude, and so each row of a pair of
// tiles is sent with its own power of two.
//
// The messages of a step's kRows rows are in an order in which a warp reads adjacent bytes: for
// each pair of adjacent tiles a vector for each gate, [row, lane of four, tile, four columns]. The
// scales are sent with them, for each warp that reads, [lane of four, pair, tile, row of two], one
// byte each: the exponent of a float. Messages are sent in full, also for rows and columns beyond
// the batch and the hidden size.
#pragma once

#include "product.h"

namespace tch_extension::recurrent::grid {
namespace {

constexpr int kBytesOfVector = kWarp * 16;
static_assert(kRows == kExchangeRows && 2 * kTile == kExchangeColumns,
              "messages have the room that they need");

// Where the messages of sub-batches are, if each warp reads this many pairs.
template <int kGates, int kPairsOfWarp>
struct ScaledLayout {
  enum : int {
    kBytesOfPair = kGates * kBytesOfVector,
    kScaleVectors = (kPairsOfWarp + 3) / 4,  // of a lane
    kBytesOfLane = kScaleVectors * 16,
    kBytesOfWarp = 4 * kBytesOfLane,
  };

  template <typename Params>
  explicit __device__ __forceinline__ ScaledLayout(const Params& params)
      : messages(static_cast<unsigned char*>(params.exchange)),
        scales(reinterpret_cast<unsigned char*>(params.exchange_scales)),
        subs((static_cast<int>(params.batch) + kRows - 1) / kRows),
        pairs((static_cast<int>(params.hidden) + 2 * kTile - 1) / (2 * kTile)) {}

  __device__ __forceinline__ int64_t bytes() const { return pairs * kBytesOfPair; }
  __device__ __forceinline__ int64_t bytes_of_scales() const {
    return (pairs + kPairsOfWarp - 1) / kPairsOfWarp * kBytesOfWarp;
  }
  // The index of a sub-batch among those of all steps and groups of blocks.
  __device__ __forceinline__ int64_t sub_batch(int step, int first_row) const {
    return step * subs + first_row / kRows;
  }

  unsigned char* messages;
  unsigned char* scales;
  int subs;  // of a step
  int pairs;
};

// The source of a lane's messages in an iteration.
struct ScaledSource {
  const unsigned char* messages;
  const unsigned char* scales;
  int pairs;  // from there on; none where nothing is sent
};

// Whether some byte is all ones.
__device__ __forceinline__ bool has_unsent_byte(uint32_t word) {
  return ((~word - 0x01010101) & word & 0x80808080) != 0;
}

// A warp's terms are all gates of adjacent pairs of tiles. The sums over a tile's terms are
// multiplied by the tile's scales before they are added to the sums over other tiles.
template <int kGates, int kTileCount, int kVectorCount, int kInShared, int kInFlight, int kAtOnce>
struct ScaledProduct
    : HalfProduct<__half, kTileCount, kVectorCount, kInShared, kInFlight, kAtOnce> {
  using Base = HalfProduct<__half, kTileCount, kVectorCount, kInShared, kInFlight, kAtOnce>;
  using Base::kChains, Base::kGroup, Base::kRing, Base::kTiles, Base::kVectors, Base::messages,
      Base::sums;
  static constexpr int kVectorsOfPair = kGates, kPairs = kVectors / kVectorsOfPair;
  static_assert(kGroup % kVectorsOfPair == 0, "pairs are waited for as a whole");
  using Layout = ScaledLayout<kGates, kPairs>;

  using Base::Base;

  static __device__ __forceinline__ ScaledSource source(const Layout& layout, int64_t sub_batch,
                                                        bool is_sent) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, first = warp * kPairs;
    if (!is_sent || first >= layout.pairs) return {layout.messages, layout.scales, 0};
    return {layout.messages + sub_batch * layout.bytes() + first * Layout::kBytesOfPair + lane * 16,
            layout.scales + sub_batch * layout.bytes_of_scales() + warp * Layout::kBytesOfWarp +
                lane % 4 * Layout::kBytesOfLane,
            layout.pairs - first};
  }

  // The first of the two terms of a word.
  static __device__ __forceinline__ int column_of(int vector, int tile_of_pair, int word) {
    const int pair = threadIdx.x / kWarp * kPairs + vector / kVectorsOfPair;
    return (pair * 2 + tile_of_pair) * kTile + threadIdx.x % 4 * 4 + word * 2;
  }
  static __device__ __forceinline__ int gate_of(int vector) { return vector % kVectorsOfPair; }

  __device__ __forceinline__ void load(const ScaledSource& source, int vector) {
    messages[vector % kRing] =
        vector / kVectorsOfPair < source.pairs
            ? hopper::load_relaxed_4_words(source.messages + vector * kBytesOfVector)
            : uint4{};
  }

  __device__ __forceinline__ void load_scales(const ScaledSource& source) {
#pragma unroll
    for (int vector = 0; vector < Layout::kScaleVectors; ++vector) {
      const uint4 words =
          source.pairs > 0 ? hopper::load_relaxed_4_words(source.scales + vector * 16) : uint4{};
      scales[vector * 4] = words.x;
      scales[vector * 4 + 1] = words.y;
      scales[vector * 4 + 2] = words.z;
      scales[vector * 4 + 3] = words.w;
    }
  }

  __device__ __forceinline__ bool are_sent(const ScaledSource& source) const {
    bool missing = false;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      missing |= pair < source.pairs && has_unsent_byte(scales[pair]);
    }
    return !__any_sync(kAllLanes, missing);
  }

  __device__ __forceinline__ void begin(const ScaledSource& source) {
    load_scales(source);
#pragma unroll
    for (int vector = 0; vector < kRing; ++vector) load(source, vector);
  }

  // The first group also waits for all scales.
  __device__ __forceinline__ bool is_missing(const ScaledSource& source, int first) const {
    return Base::is_missing(first) || (first == 0 && !are_sent(source));
  }

  // Waits until a group has arrived. Later messages of this iteration that are in flight and
  // missing are loaded again, too.
  __device__ __forceinline__ void wait(const ScaledSource& source, int first) {
    while (is_missing(source, first)) {
      if (first == 0) load_scales(source);
#pragma unroll
      for (int vector = first; vector < first + kRing && vector < kVectors; ++vector) {
        if (is_unsent(messages[vector % kRing])) load(source, vector);
      }
    }
  }

  // Like HalfProduct::multiply; the source is always messages.
  __device__ __forceinline__ bool multiply(const ScaledSource& here, const ScaledSource& next, bool,
                                           bool ahead) {
    uint32_t of_pairs[kPairs];
    this->begin_sums();
#pragma unroll
    for (int first = 0; first < kVectors; first += kGroup) {
      wait(here, first);
      if (first == 0) take_scales(of_pairs, here);
#pragma unroll
      for (int vector = first; vector < first + kGroup; vector += kVectorsOfPair) {
        multiply_pair(vector / kVectorsOfPair, of_pairs[vector / kVectorsOfPair]);
      }
      if (first + kRing == kVectors && ahead) load_scales(next);
#pragma unroll
      for (int vector = first + kRing; vector < first + kRing + kGroup; ++vector) {
        if (vector < kVectors) {
          load(here, vector);
        } else if (ahead) {
          load(next, vector - kVectors);
        }
      }
    }
    return ahead;
  }

  // Takes zeros for pairs that are not sent: their bytes as scales would turn zeros into NaN.
  __device__ __forceinline__ void take_scales(uint32_t (&of_pairs)[kPairs],
                                              const ScaledSource& source) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
      of_pairs[pair] = pair < source.pairs ? scales[pair] : 0;
  }

  __device__ __forceinline__ void multiply_pair(int pair, uint32_t of_pair) {
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
    constexpr uint32_t kExponent = 0x7f800000;
    const float of_rows[2][2] = {
        {__uint_as_float(of_pair << 23 & kExponent), __uint_as_float(of_pair << 15 & kExponent)},
        {__uint_as_float(of_pair << 7 & kExponent), __uint_as_float(of_pair >> 1 & kExponent)}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        auto& sum = sums[(pair * 2 + half) % kChains][tile];
#pragma unroll
        for (int of = 0; of < 4; ++of) sum[of] += parts[half][tile][of] * of_rows[half][of % 2];
      }
    }
  }

  uint32_t scales[Layout::kScaleVectors * 4];
};

// Gradients are multiplied by the scale of their row of W_h and by 2^kTopOfWeights. That product is
// about the largest weight of the row, instead of 2^-14 of it, so that small gradients keep their
// digits.
constexpr int kTopOfWeights = 14;

// The power of two that takes finite values up to `largest` (given as bits) below 2^15, and the
// exponent of its inverse without kTopOfWeights. The exponent is neither 0 nor the byte that means
// unsent.
struct MessageScale {
  explicit __device__ __forceinline__ MessageScale(uint32_t largest) {
    constexpr uint32_t kBias = 127, kDigits = 23, kTop = 14, kOffset = kTop + kTopOfWeights;
    const uint32_t exponent = max(largest >> kDigits, kOffset + 1);
    there = __uint_as_float((2 * kBias + kTop - exponent) << kDigits);
    back = exponent - kOffset;
  }
  float there;
  uint32_t back;
};

// The addresses to which a lane sends its two columns of a row.
template <typename Layout>
struct ScaledTarget;
template <int kGates, int kPairsOfWarp>
struct ScaledTarget<ScaledLayout<kGates, kPairsOfWarp>> {
  using Layout = ScaledLayout<kGates, kPairsOfWarp>;

  __device__ __forceinline__ ScaledTarget(const Layout& layout, int64_t sub_batch, int row,
                                          int column) {
    const int pair = column / (2 * kTile), half = column / kTile % 2;
    const int of_word = pair * Layout::kBytesOfPair + row * 64 + column % kTile / 4 * 16 +
                        half * 8 + column % 4 * 2;
    const int of_scale = pair / kPairsOfWarp * Layout::kBytesOfWarp +
                         row / 2 * Layout::kBytesOfLane + pair % kPairsOfWarp * 4 + half * 2 +
                         row % 2;
    words = layout.messages + sub_batch * layout.bytes() + of_word;
    scale = layout.scales + sub_batch * layout.bytes_of_scales() + of_scale;
  }

  __device__ __forceinline__ __half* of_gate(int gate) const {
    return reinterpret_cast<__half*>(words + gate * kBytesOfVector);
  }

  unsigned char* words;
  unsigned char* scale;
};

// The largest finite magnitude among the columns of a row, as bits.
template <int kGates>
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
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, apart));
  }
  return largest;
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
