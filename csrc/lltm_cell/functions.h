// What the gates of a cell go through, on CUDA.
#pragma once

#include "../hopper/approximate.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {

// The functions of the cell, in the precision that values of type T are stored in. For the half
// kinds, which keep 11 digits at most, the hardware's exponential does: its error, and that of the
// ways below around a lost digit, stays under 2^-16. With the exact ones these kernels are bound by
// arithmetic, not by memory.
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
      // Near 0, where exp(x) - 1 would lose digits, the series.
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
