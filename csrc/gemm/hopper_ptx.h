// Instructions of capability 9.0 for which CUDA C++ has no name: barriers in shared memory that
// count bytes, bulk copies of tiles, and products of a warpgroup. Shared memory is given by its
// 32-bit address.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tch_extension::gemm {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and has the phase wait for as many bytes of bulk copies, too.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Until the phase of this parity is over. A barrier begins in phase 0: waiting for parity 1 then
// returns at once.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  uint32_t is_over = 0;
  while (is_over == 0) {
    asm volatile(
        "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.u32 %0, 1, 0, over;\n}"
        : "=r"(is_over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// What ordinary stores wrote to shared memory, and barriers that were initialized, become visible
// to bulk copies.
__device__ __forceinline__ void fence_for_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A box at (x, y, batch), x running fastest; outside of the matrix there are zeros.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int x, int y, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(batch), "r"(barrier)
      : "memory");
}

// What is outside of the matrix is left out.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int x, int y,
                                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(batch)
      : "memory");
}

// Until shared memory that is stored from may be written to again.
__device__ __forceinline__ void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// What a product of a warpgroup reads from rows of 128 bytes, swizzled as bulk copies do it. If the
// rows of the tile run along M or N instead of K, its 64-wide parts are 8192 bytes apart. The upper
// bits of an address are no part of it.
template <bool kAcross>
__device__ __forceinline__ uint64_t tile_descriptor(uint32_t address) {
  constexpr uint64_t kSwizzled = 1ull << 62;
  constexpr uint64_t kEightRows = 1024 >> 4;
  constexpr uint64_t kParts = kAcross ? 8192 >> 4 : 1;
  return kSwizzled | kEightRows << 32 | kParts << 16 | (address & 0x3ffff) >> 4;
}

// In descriptors, to the next 16 of K.
template <bool kAcross>
constexpr uint64_t kNextInner = (kAcross ? 16 * 128 : 16 * 2) >> 4;

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until so many groups of products, or fewer, are under way.
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

// Starts sum = lhs rhs, or adds to it: 64×16 by 16×128 of a warpgroup. A thread has, for i from 0
// to 15, of rows 16·warp + lane / 4 and 8 below that, the columns 8·i + 2·(lane % 4) and the next.
template <typename T, bool kAcross>
__device__ __forceinline__ void multiply(float (&sum)[64], uint64_t lhs, uint64_t rhs, int add) {
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

// The same for 192 columns; rhs lies along K.
template <typename T>
__device__ __forceinline__ void multiply(float (&sum)[96], uint64_t lhs, uint64_t rhs, int add) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_192("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_192("bf16");
  }
}

#undef TCH_EXTENSION_MULTIPLY_192

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
#define TCH_EXTENSION_MULTIPLY_ADD_96(kind)                                                     \
  TCH_EXTENSION_MULTIPLY_ADD("96", kind,                                                        \
                             TCH_EXTENSION_TEN() TCH_EXTENSION_TEN(1) TCH_EXTENSION_TEN(2)      \
                                 TCH_EXTENSION_TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47", \
                             "{%48, %49, %50, %51}, %52", TCH_EXTENSION_SUMS(0),                \
                             TCH_EXTENSION_SUMS(8), TCH_EXTENSION_SUMS(16),                     \
                             TCH_EXTENSION_SUMS(24), TCH_EXTENSION_SUMS(32),                    \
                             TCH_EXTENSION_SUMS(40))

// sum += lhs rhs: 64×16 by 16×32 or 16×96. A thread has, of the same rows as above, the columns
// 2·(lane % 4) and the next of lhs, of the first row and the second, and then those 8 behind them.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[16], const uint32_t (&lhs)[4],
                                             uint64_t rhs) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_ADD_32("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_ADD_32("bf16");
  }
}
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[48], const uint32_t (&lhs)[4],
                                             uint64_t rhs) {
  if constexpr (std::is_same_v<T, __half>) {
    TCH_EXTENSION_MULTIPLY_ADD_96("f16");
  } else {
    TCH_EXTENSION_MULTIPLY_ADD_96("bf16");
  }
}

#undef TCH_EXTENSION_MULTIPLY_ADD_96
#undef TCH_EXTENSION_MULTIPLY_ADD_32
#undef TCH_EXTENSION_MULTIPLY_ADD
#undef TCH_EXTENSION_MULTIPLY
#undef TCH_EXTENSION_SUMS
#undef TCH_EXTENSION_TEN

// Rounded, and 0 where negative; NaN stays.
template <typename T>
__device__ __forceinline__ uint32_t rounded_relu(float2 pair) {
  uint32_t result;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(pair.y), "f"(pair.x));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(pair.y), "f"(pair.x));
  }
  return result;
}

template <typename T>
__device__ __forceinline__ uint32_t rounded(float2 pair) {
  uint32_t result;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(pair.y), "f"(pair.x));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(pair.y), "f"(pair.x));
  }
  return result;
}

template <typename T>
__device__ __forceinline__ float2 as_floats(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
}

}  // namespace tch_extension::gemm
