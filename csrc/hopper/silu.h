// The logistic function and SiLU, with their derivatives.
#pragma once

#include "approximate.h"
#include "tch_extension/launch.h"

namespace tch_extension::hopper {

// An activation and its derivative.
template <typename C>
struct Slope {
  C value;
  C derivative;
};

// The half kinds keep at most 11 binary digits, for which the hardware's exponential is accurate
// enough. With exact functions, the kernels would be bound by arithmetic instead of memory.
template <typename T>
constexpr bool kIsHalf = sizeof(T) == 2;

// s = 1 / (1 + exp(-x)) and its derivative s (1 - s), both to the last digits where s is near 0
// or 1.
template <typename T>
__device__ __forceinline__ Slope<Compute<T>> logistic(Compute<T> x) {
  using C = Compute<T>;
  C e;
  C r;
  if constexpr (kIsHalf<T>) {
    e = fast_exp(-fabsf(x));
    r = fast_reciprocal(1.0f + e);
  } else {
    e = exp(-fabs(x));
    r = C(1) / (C(1) + e);
  }
  const C small = e * r;
  return {x < C(0) ? small : r, small * r};
}

template <typename T>
__device__ __forceinline__ Slope<Compute<T>> silu(Compute<T> x) {
  const Slope<Compute<T>> s = logistic<T>(x);
  return {x * s.value, s.value + x * s.derivative};
}

}  // namespace tch_extension::hopper
