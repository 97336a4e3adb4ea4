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
constexpr int kProducerRegisters = 216;
constexpr int kFinisherRegisters = 40;

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

// What is not sent yet. Two values of a half kind are sent as one word, and those of no conversion are both
// all ones.
constexpr uint32_t kUnsent = ~0u;

// A float that is none: some others could be rounded up to what is one.
constexpr uint32_t kNotANumber = 0x7fc00000;

template <typename T>
__device__ __forceinline__ void send_two(T* to, float first, float second) {
  if constexpr (sizeof(T) == 2) {
    constexpr uint32_t kNotNumbers = 0x7fff7fff;
    const uint32_t word = bits_of(static_cast<T>(first)) | bits_of(static_cast<T>(second)) << 16;
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word == kUnsent ? kNotNumbers : word)
                 : "memory");
  } else {
    auto word = [](float value) { return isnan(value) ? kNotANumber : __float_as_uint(value); };
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word(first)), "r"(word(second))
                 : "memory");
  }
}

[[maybe_unused]] __device__ __forceinline__ bool is_unsent(const uint4& words) {
  return max(max(words.x, words.y), max(words.z, words.w)) == kUnsent;
}

// In tf32, of 16 × 8 and 8 × 8.
__device__ __forceinline__ void multiply_add_tf32(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t to_tf32(uint32_t value) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(value)));
  return rounded;
}

// Weights as the product takes them.
template <typename T>
__device__ __forceinline__ uint4 operands(const uint4& values) {
  if constexpr (sizeof(T) == 2) return values;
  return make_uint4(to_tf32(values.x), to_tf32(values.y), to_tf32(values.z), to_tf32(values.w));
}

// And messages: of a float the product drops what is behind tf32's digits, so that adding half of its last
// one rounds as to_tf32 does; but for some of those that are not numbers, which are not sent.
template <typename T>
__device__ __forceinline__ uint4 operands_of_message(const uint4& values) {
  if constexpr (sizeof(T) == 2) return values;
  constexpr uint32_t kHalf = 0x1000;
  return make_uint4(values.x + kHalf, values.y + kHalf, values.z + kHalf, values.w + kHalf);
}

// As a message would have it.
template <typename T>
__device__ __forceinline__ void make_message(uint4& values) {
  if constexpr (sizeof(T) == 2) return;
  auto word = [](uint32_t bits) { return isnan(__uint_as_float(bits)) ? kNotANumber : bits; };
  values = make_uint4(word(values.x), word(values.y), word(values.z), word(values.w));
}

template <typename T>
__device__ __forceinline__ void multiply_add_one(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  if constexpr (sizeof(T) == 2) {
    multiply_add<T>(sums, a, b0, b1);
  } else {
    multiply_add_tf32(sums, a, b0, b1);
  }
}

// Two values as they are in memory.
template <typename S>
using BitsOfTwo = std::conditional_t<sizeof(S) == 2, uint32_t, uint2>;

template <typename S>
__device__ __forceinline__ float2 values_of(const BitsOfTwo<S>& bits) {
  if constexpr (std::is_same_v<S, float>) {
    return {__uint_as_float(bits.x), __uint_as_float(bits.y)};
  } else {
    auto value = [](uint32_t half) {
      const auto narrow = static_cast<unsigned short>(half);
      if constexpr (std::is_same_v<S, __half>) return static_cast<float>(__ushort_as_half(narrow));
      if constexpr (!std::is_same_v<S, __half>) return static_cast<float>(__ushort_as_bfloat16(narrow));
    };
    return {value(bits), value(bits >> 16)};
  }
}

template <typename S>
__device__ __forceinline__ void store_two(S* to, float first, float second) {
  if constexpr (std::is_same_v<S, float>) {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  } else {
    *reinterpret_cast<uint32_t*>(to) = bits_of(static_cast<S>(first)) | bits_of(static_cast<S>(second)) << 16;
  }
}

}  // namespace
}  // namespace tch_extension
