// The activations of csrc/mlp on CUDA, with their derivatives.
#pragma once

#include "../hopper/silu.h"
#include "mlp.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension::mlp {

using hopper::kIsHalf;
using hopper::logistic;
using hopper::silu;
using hopper::Slope;

// (1 + tanh(v)) / 2 is logistic(2 v), which keeps its digits where tanh is near -1.
template <typename T>
__device__ __forceinline__ Slope<Compute<T>> gelu_tanh(Compute<T> x) {
  using C = Compute<T>;
  constexpr C kTwice = C(2 * 0.79788456080286535588);  // 2 √(2 / π)
  constexpr C kCubic = C(0.044715);
  const C square = x * x;
  const Slope<C> s = logistic<T>(kTwice * x * (C(1) + kCubic * square));
  const C inner = kTwice * (C(1) + C(3) * kCubic * square);
  return {x * s.value, s.value + x * s.derivative * inner};
}

// Φ(x) and exp(-x² / 2).
template <typename C>
struct Normal {
  C share;
  C density;
};

template <typename T>
__device__ __forceinline__ Normal<Compute<T>> normal(Compute<T> x) {
  using C = Compute<T>;
  constexpr C kRootOfHalf = C(0.70710678118654752440);
  if constexpr (kIsHalf<T>) {
    // Abramowitz and Stegun 7.1.26: erfc(v) = exp(-v²) t (a1 + t (a2 + ...)) for v >= 0 with
    // t = 1 / (1 + p v), within 1.5e-7.
    constexpr float kP = 0.3275911f * kRootOfHalf;
    const float density = hopper::fast_exp(-0.5f * x * x);
    const float t = hopper::fast_reciprocal(1.0f + kP * fabsf(x));
    float series = 1.061405429f;
    series = series * t - 1.453152027f;
    series = series * t + 1.421413741f;
    series = series * t - 0.284496736f;
    series = series * t + 0.254829592f;
    const float beyond = 0.5f * series * t * density;
    return {x > 0.0f ? 1.0f - beyond : beyond, density};
  } else {
    return {C(0.5) * (C(1) + erf(x * kRootOfHalf)), exp(C(-0.5) * x * x)};
  }
}

template <typename T>
__device__ __forceinline__ Slope<Compute<T>> gelu(Compute<T> x) {
  using C = Compute<T>;
  constexpr C kDensityAt0 = C(0.39894228040143267794);
  const auto [share, density] = normal<T>(x);
  return {x * share, share + x * kDensityAt0 * density};
}

// NaN stays NaN; max(x, 0) would make it 0.
template <typename T>
__device__ __forceinline__ Slope<Compute<T>> relu_squared(Compute<T> x) {
  using C = Compute<T>;
  const C kept = x <= C(0) ? C(0) : x;
  return {kept * kept, kept + kept};
}

// The activation of each value, rounded, which takes fewer registers; and grad times its
// derivative.
template <typename T, int kLanes>
struct Slopes {
  Vector<T, kLanes> value;
  Values<T, kLanes> gradient;
};

// All threads have the same activation, so that one branch for each vector costs little.
template <typename T, int kLanes>
__device__ __forceinline__ Slopes<T, kLanes> slopes(MlpActivation activation,
                                                    const Values<T, kLanes>& grad,
                                                    const Values<T, kLanes>& x) {
  Slopes<T, kLanes> result;
  const auto fill = [&](auto of) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const Slope<Compute<T>> slope = of(x.lane[lane]);
      result.value.lane[lane] = static_cast<T>(slope.value);
      result.gradient.lane[lane] = grad.lane[lane] * slope.derivative;
    }
  };
  using C = Compute<T>;
  switch (activation) {
    case MlpActivation::GeluTanh:
      fill([](C value) { return gelu_tanh<T>(value); });
      break;
    case MlpActivation::Gelu:
      fill([](C value) { return gelu<T>(value); });
      break;
    case MlpActivation::ReluSquared:
      fill([](C value) { return relu_squared<T>(value); });
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        // It is selected, because NaN or infinity times 0 is NaN.
        if (x.lane[lane] <= C(0)) result.gradient.lane[lane] = C(0);
      }
      break;
    case MlpActivation::Silu:
      fill([](C value) { return silu<T>(value); });
      break;
  }
  return result;
}

}  // namespace tch_extension::mlp
