// What the grid's kernels are made of: messages through the L2 cache, and products with weights that stay in
// registers.
#pragma once

#include "grid.h"
#include "persistent_device.h"

namespace tch_extension {
namespace {

// They share the terms of the block's sums.
constexpr int kWarps = 8;
constexpr int kProducers = kWarps * kWarp;
// Threads that do the rest.
constexpr int kFinishers = 4 * kWarp;
constexpr int kGridThreads = kProducers + kFinishers;
// Of each thread; together no more than the block starts with, 168 for each.
constexpr int kProducerRegisters = 232;
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

__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

// What is no message: all bits of a value are set. Conversions make another one of what is not a number, and
// this keeps it so.
template <typename T>
__device__ __forceinline__ void send_message(T* to, T value) {
  if constexpr (sizeof(T) == 2) {
    constexpr uint32_t kNone = 0xffff, kNotANumber = 0x7fff;
    const uint32_t bits = bits_of(value);
    const auto sent = static_cast<uint16_t>(bits == kNone ? kNotANumber : bits);
    asm volatile("st.relaxed.gpu.global.b16 [%0], %1;" ::"l"(to), "h"(sent) : "memory");
  } else {
    constexpr uint32_t kNone = 0xffffffff, kNotANumber = 0x7fffffff;
    const uint32_t bits = __float_as_uint(value);
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(bits == kNone ? kNotANumber : bits)
                 : "memory");
  }
}

// Whether a value of these 16 bytes is still to come.
template <typename T>
__device__ __forceinline__ bool is_missing(const uint4& values) {
  if constexpr (sizeof(T) == 2) {
    // Of a word's halves one is all ones, if adding one to each carries beyond a half that had its highest
    // bit.
    constexpr uint32_t kOnes = 0x00010001, kHighest = 0x80008000;
    auto carries = [](uint32_t word) { return ~(word + kOnes) & word; };
    return ((carries(values.x) | carries(values.y) | carries(values.z) | carries(values.w)) & kHighest) != 0;
  } else {
    constexpr uint32_t kNone = 0xffffffff;
    return values.x == kNone || values.y == kNone || values.z == kNone || values.w == kNone;
  }
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

// As the product takes them.
template <typename T>
__device__ __forceinline__ uint4 operands(const uint4& values) {
  if constexpr (sizeof(T) == 2) return values;
  return make_uint4(to_tf32(values.x), to_tf32(values.y), to_tf32(values.z), to_tf32(values.w));
}

// sums += a b of two instructions, whose terms a lane's 16 bytes of a row of b are: the instructions' order
// of them is another one, and so it is that of a. The second may have sums of its own, so that it need not
// wait for the first.
template <typename T>
__device__ __forceinline__ void multiply_add_vector(float (&first)[4], float (&second)[4],
                                                    const uint32_t (&a)[2][4], const uint4& b) {
  if constexpr (sizeof(T) == 2) {
    multiply_add<T>(first, a[0], b.x, b.y);
    multiply_add<T>(second, a[1], b.z, b.w);
  } else {
    multiply_add_tf32(first, a[0], b.x, b.y);
    multiply_add_tf32(second, a[1], b.z, b.w);
  }
}

// Columns of a row that four lanes take with 16 bytes each.
template <typename T>
constexpr int kSpan = 4 * kLanesOf16Bytes<T>;

// A step of a sub-batch: they are worked through in turn.
struct Turn {
  int step, sub;
  __device__ __forceinline__ void advance(int subs) {
    if (++sub == subs) {
      sub = 0;
      ++step;
    }
  }
};

}  // namespace
}  // namespace tch_extension
