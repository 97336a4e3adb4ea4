// How the backward pass of a wide grid multiplies fp16 values where libtorch allows tf32
// (scale_rows.h). Gradients for the gates may have any magnitude, and so each warpgroup of a block
// divides what it sends of a row by its own power of two. The receiver first brings a row's
// messages to one scale, the largest of them.
#pragma once

#include "../../hopper/convert.h"
#include "product.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

// Columns of h of a block.
constexpr int kColumns = OneTile::kColumns;
static_assert(kColumns == grid::kExchangeColumns &&
                  OneTile::kGroupColumns == grid::kColumnsOfScale &&
                  grid::kScaledColumns == 4 * kColumns,
              "messages have the room that they need");

// The memory of messages and scales.
template <int kGates>
struct ScaledMessages {
  // How many values each block sends for a row of the batch.
  static constexpr int kSentColumns = kGates * kColumns;

  explicit __device__ __forceinline__ ScaledMessages(const BackwardParams& params)
      : blocks(OneTile::blocks(params.hidden)),
        messages(static_cast<__half*>(params.exchange)),
        scales(params.exchange_scales) {}

  // The messages of a row among those of all steps: [block, gate, column].
  __device__ __forceinline__ __half* of_row(uint32_t row) const {
    return messages + static_cast<int64_t>(row) * (kSentColumns * blocks);
  }
  // What these messages were divided by: [four blocks, group, block].
  __device__ __forceinline__ float* scale_of(uint32_t row, int block, int group) const {
    const int of_row = (blocks + 3) / 4 * 8;
    return scales + static_cast<int64_t>(row) * of_row + block / 4 * 8 + group * 4 + block % 4;
  }
  // The row of W_h that a term belongs to; negative if there is none.
  static __device__ __forceinline__ int row_of_term(int term, int hidden) {
    const int column = term / kSentColumns * kColumns + term % kColumns;
    return column < hidden ? term % kSentColumns / kColumns * hidden + column : -1;
  }

  const int blocks;
  __half* const messages;
  float* const scales;
};

// The power of two by which numbers up to `largest` are divided, to reach the upper end of the
// range of fp16.
struct MessageScale {
  explicit __device__ __forceinline__ MessageScale(float largest) {
    // Exponents for which the scale and its inverse are both normal floats.
    constexpr uint32_t kLeast = 16, kMost = 254, kTop = 14, kBias = 127;
    const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, kLeast), kMost) - kTop;
    bits = largest > 0 ? exponent << 23 : 0;
    inverse = __uint_as_float((2 * kBias - exponent) << 23);
  }
  // Zero if all numbers are zero.
  uint32_t bits;
  float inverse;
};

// The factors by which a thread multiplies the messages of its two rows, which come from kSenders
// blocks.
template <int kGates, int kSenders, bool kWhole>
struct ScaleFactors {
  // Four lanes share a row: two of them read what the first warpgroups sent and two what the second
  // ones did, and each of the two loads half of the scales.
  __device__ __forceinline__ void find(const ScaledMessages<kGates>& sent,
                                       const Place<OneTile>& place, int half, uint32_t row) {
    const int first = place.group * kSenders + place.of_four % 2 * 2;
    all = sent.blocks - first;
    from[half] = sent.scale_of(row, first, place.of_four / 2);
  }

  __device__ __forceinline__ void load() {
    int there = all;
    if (!kWhole) hopper::compiler_barrier(there);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int four = 0; four < kSenders / 4; ++four) {
        const void* at = from[half] + four * 8;
        if (!kWhole && four * 4 >= there) at = &wide_zeros;
        uint2& two = scales[half][four];
        two = hopper::load_relaxed_2_words(at);
        if (!kWhole && four * 4 + 1 >= there) two.y = 0;
      }
    }
  }

  __device__ __forceinline__ uint32_t largest_of(int half) const {
    uint32_t largest = 0;
#pragma unroll
    for (const uint2& two : scales[half]) largest = max(largest, max(two.x, two.y));
    return largest;
  }

  // Waits for the scales, whose loads are in flight, and computes the factors.
  __device__ __forceinline__ void wait() {
    constexpr uint32_t kOne = 0x3f800000;
    // 2^-24, the smallest positive fp16 value.
    constexpr float kLeastHalf = 1.0f / (1 << 24);
    uint32_t largest[2] = {largest_of(0), largest_of(1)};
    while (__any_sync(~0u, max(largest[0], largest[1]) == grid::kUnsent)) {
      load();
      largest[0] = largest_of(0);
      largest[1] = largest_of(1);
    }
    bool any_in_two = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t& most = largest[half];
      most = max(most, __shfl_xor_sync(kAllLanes, most, 1));
      most = max(most, __shfl_xor_sync(kAllLanes, most, 2));
      of_sums[half] = __uint_as_float(most);
      // A factor that fp16 cannot represent is applied in two steps, and is negative in each.
      auto factor = [&](uint32_t scale) {
        const float whole = __int_as_float(max(static_cast<int32_t>(scale + kOne - most), 0));
        if (whole >= kLeastHalf) return whole;
        any_in_two |= scale != 0;
        return whole / -kSecondFactor;
      };
#pragma unroll
      for (int four = 0; four < kSenders / 4; ++four) {
        const uint2 two = scales[half][four];
        const __half2 halves = __floats2half2_rn(factor(two.x), factor(two.y));
        const auto own = *reinterpret_cast<const uint32_t*>(&halves);
        of_messages[half][2 * four] = __shfl_sync(kAllLanes, own, 0, 2);
        of_messages[half][2 * four + 1] = __shfl_sync(kAllLanes, own, 1, 2);
      }
    }
    are_in_two = __any_sync(kAllLanes, any_in_two);
  }

  // Multiplies kCount vectors. What is less than 2^-39 of the row's largest becomes zero.
  template <int kCount, typename Messages>
  __device__ __forceinline__ void multiply(Messages& messages, int first) const {
    with_each<kCount>(messages, first, [](uint32_t factor) { return factor; });
    if (!are_in_two) return;
    // -kSecondFactor, or 1, in both halves of the word.
    constexpr uint32_t kSecond = 0x82008200, kOne = 0x3c003c00;
    with_each<kCount>(messages, first, [](uint32_t factor) {
      return static_cast<int32_t>(factor) < 0 ? kSecond : kOne;
    });
  }

  template <int kCount, typename Messages, typename Factor>
  __device__ __forceinline__ void with_each(Messages& messages, int first,
                                            const Factor& factor_of) const {
#pragma unroll
    for (int vector = first; vector < first + kCount; ++vector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // One of two factors, in both halves of the word. It is computed where it is needed,
        // because all of them would take too many registers.
        const int sender = vector / kGates;
        const uint32_t both = hopper::repeat_half(of_messages[half][sender / 2], sender % 2 != 0);
        const uint32_t factor = factor_of(both);
        uint4& four = messages[vector][half];
        hopper::multiply_fp16_pair(four.x, factor);
        hopper::multiply_fp16_pair(four.y, factor);
        hopper::multiply_fp16_pair(four.z, factor);
        hopper::multiply_fp16_pair(four.w, factor);
      }
    }
  }

  static constexpr float kSecondFactor = 1.0f / (1 << 15);

  int all;
  const float* from[2];
  // The scales as bits.
  uint2 scales[2][kSenders / 4];
  // Each word holds two fp16 factors.
  uint32_t of_messages[2][kSenders / 2];
  bool are_in_two;
  float of_sums[2];
};

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
