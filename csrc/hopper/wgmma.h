// Products of a warpgroup by tensor cores (wgmma). The right operand, and in some of them also the
// left one, is in shared memory. They run asynchronously, in groups. Only for compute capability
// 9.0 (sm_90a).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tch_extension::hopper {

// Describes an operand in shared memory: rows of 128 bytes, swizzled as bulk copies do it. If the
// rows of the tile run along M or N instead of K (kAcross), its 64-wide parts are 8192 bytes apart.
// The descriptor has room for 18 bits of the address.
template <bool kAcross>
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzled = 1ull << 62;
  constexpr uint64_t kEightRows = 1024 >> 4;
  constexpr uint64_t kParts = kAcross ? 8192 >> 4 : 1;
  return kSwizzled | kEightRows << 32 | kParts << 16 | (address & 0x3ffff) >> 4;
}

// What is added to a descriptor to reach the next 16 values along K.
template <bool kAcross>
constexpr uint64_t kNextInner = (kAcross ? 16 * 128 : 16 * 2) >> 4;

// Has to come before the first product that uses registers or shared memory that were written
// before.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// Ends a group: all products that were started since the last group.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kMost groups of products are still in flight.
template <int kMost>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kMost) : "memory");
}

#define TCH_EXTENSION_TEN(tens)                                                           \
  "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, %" #tens "5, %" #tens \
  "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define TCH_EXTENSION_SUMS(i)                                                           \
  "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3]), "+f"(sum[i + 4]), \
      "+f"(sum[i + 5]), "+f"(sum[i + 6]), "+f"(sum[i + 7])
#define TCH_EXTENSION_MULTIPLY(kind)                                                          \
  asm volatile(                                                                               \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                        \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind " {" TCH_EXTENSION_TEN()   \
          TCH_EXTENSION_TEN(1) TCH_EXTENSION_TEN(2) TCH_EXTENSION_TEN(3) TCH_EXTENSION_TEN(4) \
              TCH_EXTENSION_TEN(5) "%60, %61, %62, %63}, %64, %65, add, 1, 1, 0, %67;\n}"     \
      : TCH_EXTENSION_SUMS(0), TCH_EXTENSION_SUMS(8), TCH_EXTENSION_SUMS(16),                 \
        TCH_EXTENSION_SUMS(24), TCH_EXTENSION_SUMS(32), TCH_EXTENSION_SUMS(40),               \
        TCH_EXTENSION_SUMS(48), TCH_EXTENSION_SUMS(56)                                        \
      : "l"(lhs), "l"(rhs), "r"(add), "n"(kAcross))

// Starts sum = lhs rhs, or sum += lhs rhs if `add` is not 0: 64×16 by 16×128. For i from 0 to 15 a
// thread has the columns 8·i + 2·(lane % 4) and the next one, each of row 16·warp + lane / 4 and of
// the row 8 below it.
template <typename T, bool kAcross>
__device__ __forceinline__ void warpgroup_multiply(float (&sum)[64], uint64_t lhs, uint64_t rhs,
                                                   int add) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY("f16");
  } else {
    TCH_EXTENSION_MULTIPLY("bf16");
  }
}

#define TCH_EXTENSION_MULTIPLY_192(kind)                                                          \
  asm volatile(                                                                                   \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." kind "." kind                                \
      " {" TCH_EXTENSION_TEN() TCH_EXTENSION_TEN(1) TCH_EXTENSION_TEN(2) TCH_EXTENSION_TEN(3)     \
          TCH_EXTENSION_TEN(4) TCH_EXTENSION_TEN(5) TCH_EXTENSION_TEN(6) TCH_EXTENSION_TEN(7)     \
              TCH_EXTENSION_TEN(8) "%90, %91, %92, %93, %94, %95}, %96, %97, add, 1, 1, 0, 0;\n}" \
      : TCH_EXTENSION_SUMS(0), TCH_EXTENSION_SUMS(8), TCH_EXTENSION_SUMS(16),                     \
        TCH_EXTENSION_SUMS(24), TCH_EXTENSION_SUMS(32), TCH_EXTENSION_SUMS(40),                   \
        TCH_EXTENSION_SUMS(48), TCH_EXTENSION_SUMS(56), TCH_EXTENSION_SUMS(64),                   \
        TCH_EXTENSION_SUMS(72), TCH_EXTENSION_SUMS(80), TCH_EXTENSION_SUMS(88)                    \
      : "l"(lhs), "l"(rhs), "r"(add))

// The same for 64×16 by 16×192, where the rows of rhs run along K.
template <typename T>
__device__ __forceinline__ void warpgroup_multiply(float (&sum)[96], uint64_t lhs, uint64_t rhs,
                                                   int add) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_192("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_192("bf16");
  }
}

#undef TCH_EXTENSION_MULTIPLY_192

#define TCH_EXTENSION_MULTIPLY_256(kind) \
  asm volatile(                                                                                 \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                         \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." kind "." kind                              \
      " {" TCH_EXTENSION_TEN() TCH_EXTENSION_TEN(1) TCH_EXTENSION_TEN(2) TCH_EXTENSION_TEN(3)   \
          TCH_EXTENSION_TEN(4) TCH_EXTENSION_TEN(5) TCH_EXTENSION_TEN(6) TCH_EXTENSION_TEN(7)   \
          TCH_EXTENSION_TEN(8) TCH_EXTENSION_TEN(9) TCH_EXTENSION_TEN(10) TCH_EXTENSION_TEN(11) \
      "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, add, 1, 1, %131, %131;\n}"  \
      : TCH_EXTENSION_SUMS(0), TCH_EXTENSION_SUMS(8), TCH_EXTENSION_SUMS(16),                   \
        TCH_EXTENSION_SUMS(24), TCH_EXTENSION_SUMS(32), TCH_EXTENSION_SUMS(40),                 \
        TCH_EXTENSION_SUMS(48), TCH_EXTENSION_SUMS(56), TCH_EXTENSION_SUMS(64),                 \
        TCH_EXTENSION_SUMS(72), TCH_EXTENSION_SUMS(80), TCH_EXTENSION_SUMS(88),                 \
        TCH_EXTENSION_SUMS(96), TCH_EXTENSION_SUMS(104), TCH_EXTENSION_SUMS(112),               \
        TCH_EXTENSION_SUMS(120)                                                                 \
      : "l"(lhs), "l"(rhs), "r"(add), "n"(kAcross))

// The same for 64×16 by 16×256. With kAcross, the rows of both operands run along M and N.
template <typename T, bool kAcross>
__device__ __forceinline__ void warpgroup_multiply(float (&sum)[128], uint64_t lhs, uint64_t rhs,
                                                   int add) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_256("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_256("bf16");
  }
}

#undef TCH_EXTENSION_MULTIPLY_256

#define TCH_EXTENSION_MULTIPLY_ADD(columns, kind, sums, lhs_and_rhs, ...)            \
  asm volatile(                                                                      \
      "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                 \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." kind "." kind " {" sums \
      "}, " lhs_and_rhs ", add, 1, 1, 0;\n}"                                         \
      : __VA_ARGS__                                                                  \
      : "r"(lhs[0]), "r"(lhs[1]), "r"(lhs[2]), "r"(lhs[3]), "l"(rhs))
#define TCH_EXTENSION_MULTIPLY_ADD_32(kind)                                                  \
  TCH_EXTENSION_MULTIPLY_ADD("32", kind, TCH_EXTENSION_TEN() "%10, %11, %12, %13, %14, %15", \
                             "{%16, %17, %18, %19}, %20", TCH_EXTENSION_SUMS(0),             \
                             TCH_EXTENSION_SUMS(8))
#define TCH_EXTENSION_MULTIPLY_ADD_64(kind)                                                 \
  TCH_EXTENSION_MULTIPLY_ADD(                                                               \
      "64", kind, TCH_EXTENSION_TEN() TCH_EXTENSION_TEN(1) TCH_EXTENSION_TEN(2) "%30, %31", \
      "{%32, %33, %34, %35}, %36", TCH_EXTENSION_SUMS(0), TCH_EXTENSION_SUMS(8),            \
      TCH_EXTENSION_SUMS(16), TCH_EXTENSION_SUMS(24))
#define TCH_EXTENSION_MULTIPLY_ADD_96(kind)                                                     \
  TCH_EXTENSION_MULTIPLY_ADD("96", kind,                                                        \
                             TCH_EXTENSION_TEN() TCH_EXTENSION_TEN(1) TCH_EXTENSION_TEN(2)      \
                                 TCH_EXTENSION_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47", \
                             "{%48, %49, %50, %51}, %52", TCH_EXTENSION_SUMS(0),                \
                             TCH_EXTENSION_SUMS(8), TCH_EXTENSION_SUMS(16),                     \
                             TCH_EXTENSION_SUMS(24), TCH_EXTENSION_SUMS(32),                    \
                             TCH_EXTENSION_SUMS(40))

// Starts sum += lhs rhs with lhs in registers: 64×16 by 16×32, 16×64 or 16×96. Of lhs a thread has
// the columns 2·(lane % 4) and the next one, of both of its rows, and then the same columns plus 8.
template <typename T>
__device__ __forceinline__ void warpgroup_multiply_add(float (&sum)[16], const uint32_t (&lhs)[4],
                                                       uint64_t rhs) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_ADD_32("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_ADD_32("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void warpgroup_multiply_add(float (&sum)[32], const uint32_t (&lhs)[4],
                                                       uint64_t rhs) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_ADD_64("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_ADD_64("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void warpgroup_multiply_add(float (&sum)[48], const uint32_t (&lhs)[4],
                                                       uint64_t rhs) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_ADD_96("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_ADD_96("bf16");
  }
}

#undef TCH_EXTENSION_MULTIPLY_ADD_96
#undef TCH_EXTENSION_MULTIPLY_ADD_64
#undef TCH_EXTENSION_MULTIPLY_ADD_32
#undef TCH_EXTENSION_MULTIPLY_ADD
#undef TCH_EXTENSION_MULTIPLY
#undef TCH_EXTENSION_SUMS
#undef TCH_EXTENSION_TEN

}  // namespace tch_extension::hopper
