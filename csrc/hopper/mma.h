// Products of a warp by tensor cores (mma.sync), whose operands are in registers, and the load that
// brings matrices into them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tch_extension::hopper {

// sums += a b for fp16 or bf16 values T: 16×16 by 16×8. Each lane has the part of each matrix that
// PTX specifies for m16n8k16.
template <typename T>
__device__ __forceinline__ void warp_multiply_add(float (&sums)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The same for doubles: 16×16 by 16×8.
__device__ __forceinline__ void warp_multiply_add(double (&sums)[4], const double (&a)[8],
                                                  const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

// The same for doubles: 16×8 by 8×8.
__device__ __forceinline__ void warp_multiply_add(double (&sums)[4], const double (&a)[4],
                                                  const double (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

// Loads four 8×8 matrices of 16-bit values. Each lane gives the shared address of one row of 16
// bytes: lanes 0 to 7 those of the first matrix, and so on.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Stores four matrices of 8×8 halves to shared memory. Lanes 8·i to 8·i + 7 give the addresses of
// the rows of matrix i, of which a thread has the columns 2·(lane % 4) and the next one of row
// lane / 4, in a word of its own. If they are stored across, a row in memory is a column.
template <bool kAcross>
__device__ __forceinline__ void store_matrices(uint32_t row, uint32_t first, uint32_t second,
                                               uint32_t third, uint32_t fourth) {
  if constexpr (kAcross) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
        "r"(first), "r"(second), "r"(third), "r"(fourth)
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
                 "r"(first), "r"(second), "r"(third), "r"(fourth)
                 : "memory");
  }
}

}  // namespace tch_extension::hopper
