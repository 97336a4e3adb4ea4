// The hardware's approximate functions, called directly. CUDA C++'s versions also handle denormal
// numbers, with four times as many instructions. For every compute capability.
#pragma once

namespace tch_extension::hopper {

__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float fast_exp(float x) {
  constexpr float kLog2OfE = 1.4426950408889634f;
  return fast_exp2(x * kLog2OfE);
}

__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace tch_extension::hopper
