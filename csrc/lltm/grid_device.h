// What the grid's kernels are made of: messages through the L2 cache, and operands of tensor cores.
#pragma once

#include "grid.h"
#include "persistent_device.h"

namespace tch_extension {
namespace {

// They share the terms of the block's sums.
constexpr int kWarps = 8;
constexpr int kProducers = kWarps * kWarp;
// Threads that do the rest, in teams, each for a sub-batch at a time.
constexpr int kFinishers = 8 * kWarp;
constexpr int kGridThreads = kProducers + kFinishers;
// Of each thread; together no more than the block starts with, 128 for each.
constexpr int kProducerRegisters = 208;
constexpr int kFinisherRegisters = 48;

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Of some warps of the block; those that arrive go on.
__device__ __forceinline__ void arrive_at(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Past the L1 cache, which nobody else's stores reach.
__device__ __forceinline__ uint4 load_message(const void* from) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// Two messages of 8 bytes, each of which is there as a whole or not at all.
__device__ __forceinline__ uint4 load_messages(const void* from) {
  uint4 value;
  asm volatile(
      "{\n.reg .b64 first, second;\nld.relaxed.gpu.global.v2.b64 {first, second}, [%4];\n"
      "mov.b64 {%0, %1}, first;\nmov.b64 {%2, %3}, second;\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(from)
      : "memory");
  return value;
}

[[maybe_unused]] __device__ __forceinline__ uint2 load_words(const void* from) {
  uint2 words;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(from)
               : "memory");
  return words;
}

[[maybe_unused]] __device__ __forceinline__ void store_word(void* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// What is not sent yet. Two values of a half kind are sent as one word, and those of no conversion
// are both all ones.
constexpr uint32_t kUnsent = ~0u;

// A number that is none, in a kind that is sent as it is.
constexpr uint32_t kNotANumber = 0x7fc00000;
constexpr uint64_t kNotADouble = 0x7ff8000000000000;

template <typename T, typename G>
__device__ __forceinline__ void send_two(T* to, G first, G second) {
  if constexpr (sizeof(T) == 8) {
    auto word = [](double value) {
      return isnan(value) ? kNotADouble : static_cast<uint64_t>(__double_as_longlong(value));
    };
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(word(first)),
                 "l"(word(second))
                 : "memory");
    return;
  } else if constexpr (sizeof(T) == 4) {
    auto word = [](float value) { return isnan(value) ? kNotANumber : __float_as_uint(value); };
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word(first)),
                 "r"(word(second))
                 : "memory");
    return;
  } else {
    constexpr uint32_t kNotNumbers = 0x7fff7fff;
    const uint32_t word = bits_of(static_cast<T>(first)) | bits_of(static_cast<T>(second)) << 16;
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to),
                 "r"(word == kUnsent ? kNotNumbers : word)
                 : "memory");
  }
}

[[maybe_unused]] __device__ __forceinline__ bool is_unsent(const uint4& words) {
  return max(max(words.x, words.y), max(words.z, words.w)) == kUnsent;
}

// Of the kind that sums are made in.
template <typename G>
using PairOf = std::conditional_t<std::is_same_v<G, double>, double2, float2>;

// Two values as they are in memory.
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
}  // namespace tch_extension
