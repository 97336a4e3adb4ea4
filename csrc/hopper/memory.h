// Accesses to global memory that other blocks see while the kernel runs: relaxed loads and stores,
// which bypass the L1 cache, and prefetches into the L2 cache. None of them orders other accesses.
#pragma once

#include <cstdint>

namespace tch_extension::hopper {

// Loads four words. Each word is one access by itself: it is old or new as a whole.
__device__ __forceinline__ uint4 load_relaxed_4_words(const void* from) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// Loads 16 bytes, of which each half is one access by itself.
__device__ __forceinline__ uint4 load_relaxed_2_halves(const void* from) {
  uint4 value;
  asm volatile(
      "{\n.reg .b64 first, second;\nld.relaxed.gpu.global.v2.b64 {first, second}, [%4];\n"
      "mov.b64 {%0, %1}, first;\nmov.b64 {%2, %3}, second;\n}"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(from)
      : "memory");
  return value;
}

// Loads two words, each of which is one access by itself.
__device__ __forceinline__ uint2 load_relaxed_2_words(const void* from) {
  uint2 words;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(from)
               : "memory");
  return words;
}

__device__ __forceinline__ int64_t load_relaxed(const int64_t* from) {
  int64_t value;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed(void* to, uint32_t word) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

__device__ __forceinline__ void store_relaxed_byte(void* to, uint32_t byte) {
  asm volatile("st.relaxed.gpu.global.b8 [%0], %1;" ::"l"(to), "r"(byte) : "memory");
}

// Stores two values, each of which is one access by itself.
__device__ __forceinline__ void store_relaxed(void* to, uint32_t first, uint32_t second) {
  asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(first), "r"(second)
               : "memory");
}

__device__ __forceinline__ void store_relaxed(void* to, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
               : "memory");
}

// Stores two words in one access of 8 bytes: they are old or new as a whole.
__device__ __forceinline__ void store_relaxed_whole(void* to, uint32_t first, uint32_t second) {
  asm volatile(
      "{\n.reg .b64 both;\nmov.b64 both, {%1, %2};\nst.relaxed.gpu.global.b64 [%0], both;\n}" ::"l"(
          to),
      "r"(first), "r"(second)
      : "memory");
}

// Stores 16 bytes in one instruction. Where the compiler cannot rule out that the stored words
// alias what is read next, it splits an ordinary store of 16 bytes into four.
__device__ __forceinline__ void store_16_bytes(void* to, uint4 words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// Brings a cache line into the L2 cache.
__device__ __forceinline__ void prefetch(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory");
}

}  // namespace tch_extension::hopper
