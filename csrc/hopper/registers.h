// How many registers the threads of a warpgroup have, and statements that keep the compiler from
// using more of them.
#pragma once

#include <cstdint>

namespace tch_extension::hopper {

// Raises the number of registers of each thread of the warpgroup. All of the warpgroup calls this,
// and waits until other warps have given up enough registers.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Lowers the number of registers of each thread of the warpgroup.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// The compiler moves no memory access across this. Otherwise it would start so many loads at once
// that their addresses and results would not fit in registers.
__device__ __forceinline__ void compiler_barrier() { asm volatile("" ::: "memory"); }

// In addition, the compiler computes everything that depends on `value` anew after this, instead of
// keeping it.
template <typename Index>
__device__ __forceinline__ void compiler_barrier(Index& value) {
  asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void compiler_barrier(float& value) {
  asm volatile("" : "+f"(value)::"memory");
}

}  // namespace tch_extension::hopper
