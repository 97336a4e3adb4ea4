// Conversions between pairs of half-precision values, floats and doubles for which CUDA C++ has no
// name or which the compiler would move.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace tch_extension::hopper {

// Rounds both values to T, and replaces negative ones by 0; NaN stays NaN.
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

// Rounds both values to T.
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

// Converts at this point of the code. The compiler would move an ordinary conversion to where the
// float was loaded, and keep the double, for which there are no registers.
__device__ __forceinline__ double to_double(float value) {
  double wide;
  asm volatile("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(value));
  return wide;
}

__device__ __forceinline__ double to_double(double value) { return value; }

// The lower or the upper 16 bits of `pair`, twice. Like to_double, this is computed at this point.
__device__ __forceinline__ uint32_t repeat_half(uint32_t pair, bool upper) {
  uint32_t both;
  asm volatile("prmt.b32 %0, %1, 0, %2;" : "=r"(both) : "r"(pair), "r"(upper ? 0x3232 : 0x1010));
  return both;
}

// pair *= factor, where both are two fp16 values.
__device__ __forceinline__ void multiply_fp16_pair(uint32_t& pair, uint32_t factor) {
  asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(factor));
}

}  // namespace tch_extension::hopper
