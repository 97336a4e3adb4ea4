// The activation functions of a cell's gates, on CUDA.
#pragma once

#include "../hopper/approximate.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {

// The functions of the cell, with the precision in which values of type T are stored. For the half
// kinds, which keep at most 11 binary digits, the hardware's exponential is accurate enough: its
// error, and that of the series used below where digits would cancel, stays under 2^-16. With exact
// functions these kernels would be bound by arithmetic instead of memory.
template <typename T>
struct Functions {
  using C = Compute<T>;
  static constexpr bool kIsHalf = sizeof(T) == 2;

  static __device__ __forceinline__ C sigmoid(C x) {
    if constexpr (kIsHalf) return hopper::fast_reciprocal(1.0f + hopper::fast_exp(-x));
    return tch_extension::sigmoid(x);
  }

  static __device__ __forceinline__ C elu(C x) {
    if constexpr (kIsHalf) {
      // Near 0, exp(x) - 1 would lose digits, so the series is used.
      const C below =
          x > -0.03f ? x * (1.0f + x * (0.5f + x * (1.0f / 6.0f))) : hopper::fast_exp(x) - 1.0f;
      return x > 0.0f ? x : below;
    }
    return tch_extension::elu(x);
  }

  static __device__ __forceinline__ C elu_grad(C x) {
    if constexpr (kIsHalf) return x > 0.0f ? 1.0f : hopper::fast_exp(x);
    return tch_extension::elu_grad(x);
  }

  static __device__ __forceinline__ C tanh(C x) {
    if constexpr (kIsHalf) {
      const C square = x * x;
      const C near = x * (1.0f + square * (-1.0f / 3.0f + square * (2.0f / 15.0f)));
      return square < 0.0025f
                 ? near
                 : 1.0f - 2.0f * hopper::fast_reciprocal(1.0f + hopper::fast_exp(2.0f * x));
    }
    return std::tanh(x);
  }
};

}  // namespace tch_extension
