// The roles of a block's threads, and the messages that blocks send one another through the L2
// cache.
#pragma once

#include "../../hopper/async_copy.h"
#include "../../hopper/barrier.h"
#include "../../hopper/memory.h"
#include "../../hopper/mma.h"
#include "../../hopper/registers.h"
#include "../cells/activations.h"
#include "../tiles.h"
#include "params.h"

namespace tch_extension::recurrent::grid {
namespace {

// The number of warps that multiply. They share the terms of the block's sums.
constexpr int kWarps = 8;
constexpr int kProducers = kWarps * kWarp;
// The number of threads that finish sums. They form teams, each of which has one sub-batch at a
// time.
constexpr int kFinishers = 8 * kWarp;
constexpr int kGridThreads = kProducers + kFinishers;
// Registers per thread; in total no more than the block starts with, which is 128 for each thread.
constexpr int kProducerRegisters = 208;
constexpr int kFinisherRegisters = 48;

// The word that means "not sent yet". Two values of a half kind are sent as one word, and no
// conversion to a half kind gives two values whose bits are all ones.
constexpr uint32_t kUnsent = ~0u;

// The NaN that is sent in place of any other, for float and double, which are sent unconverted.
constexpr uint32_t kNotANumber = 0x7fc00000;
constexpr uint64_t kNotADouble = 0x7ff8000000000000;

template <typename T, typename G>
__device__ __forceinline__ void send_two(T* to, G first, G second) {
  if constexpr (sizeof(T) == 8) {
    auto word = [](double value) {
      return isnan(value) ? kNotADouble : static_cast<uint64_t>(__double_as_longlong(value));
    };
    hopper::store_relaxed(to, word(first), word(second));
  } else if constexpr (sizeof(T) == 4) {
    auto word = [](float value) { return isnan(value) ? kNotANumber : __float_as_uint(value); };
    hopper::store_relaxed(to, word(first), word(second));
  } else {
    constexpr uint32_t kNotNumbers = 0x7fff7fff;
    const uint32_t word = bits_of(static_cast<T>(first)) | bits_of(static_cast<T>(second)) << 16;
    hopper::store_relaxed(to, word == kUnsent ? kNotNumbers : word);
  }
}

[[maybe_unused]] __device__ __forceinline__ bool is_unsent(const uint4& words) {
  return max(max(words.x, words.y), max(words.z, words.w)) == kUnsent;
}

// Two values of the type of the sums.
template <typename G>
using PairOf = std::conditional_t<std::is_same_v<G, double>, double2, float2>;

// Two values in the type that they have in memory.
template <typename S>
using BitsOfTwo =
    std::conditional_t<sizeof(S) == 2, uint32_t, std::conditional_t<sizeof(S) == 4, uint2, uint4>>;

template <typename S>
__device__ __forceinline__ PairOf<S> values_of(const BitsOfTwo<S>& bits) {
  if constexpr (std::is_same_v<S, double>) {
    return {__hiloint2double(bits.y, bits.x), __hiloint2double(bits.w, bits.z)};
  } else if constexpr (std::is_same_v<S, float>) {
    return {__uint_as_float(bits.x), __uint_as_float(bits.y)};
  } else {
    auto value = [](uint32_t half) {
      const auto narrow = static_cast<unsigned short>(half);
      if constexpr (std::is_same_v<S, __half>) return static_cast<float>(__ushort_as_half(narrow));
      if constexpr (!std::is_same_v<S, __half>)
        return static_cast<float>(__ushort_as_bfloat16(narrow));
    };
    return {value(bits), value(bits >> 16)};
  }
}

template <typename S, typename G>
__device__ __forceinline__ void store_two(S* to, G first, G second) {
  if constexpr (sizeof(S) > 2) {
    *reinterpret_cast<PairOf<S>*>(to) = {first, second};
  } else {
    *reinterpret_cast<uint32_t*>(to) =
        bits_of(static_cast<S>(first)) | bits_of(static_cast<S>(second)) << 16;
  }
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
