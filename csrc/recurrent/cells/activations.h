// The activation functions of LLTM's gates on CUDA, for each kind of product.
#pragma once

#include <type_traits>

#include "float_functions.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {
namespace {

// In the precision that a half kind or tf32 can show, and quickly; for float in its own, for double
// exactly. T is what is multiplied.
template <typename T, typename G>
struct Activation {
  static __device__ __forceinline__ G of_gate(G x) { return sigmoid(x); }
  static __device__ __forceinline__ G of_candidate(G x) { return elu(x); }
  static __device__ __forceinline__ G candidate_grad(G x) { return elu_grad(x); }
  static __device__ __forceinline__ G of_c(G x) { return std::tanh(x); }
};

template <typename T>
struct Activation<T, float> {
  static __device__ __forceinline__ float of_gate(float x) {
    if constexpr (std::is_same_v<T, float>) return float_sigmoid(x);
    return hopper::fast_reciprocal(1.0f + hopper::fast_exp(-x));
  }

  static __device__ __forceinline__ float of_candidate(float x) {
    if constexpr (std::is_same_v<T, float>) return float_elu(x);
    // exp(x) - 1 loses its digits near 0, where few terms of the series are enough.
    float series = 1.0f / 120 * x + 1.0f / 24;
    series = series * x + 1.0f / 6;
    series = series * x + 0.5f;
    series = series * x * x + x;
    const float negative = x > -0.25f ? series : hopper::fast_exp(x) - 1.0f;
    return x > 0 ? x : negative;
  }

  static __device__ __forceinline__ float candidate_grad(float x) {
    if constexpr (std::is_same_v<T, float>) return elu_grad(x);
    return x > 0 ? 1.0f : hopper::fast_exp(x);
  }

  static __device__ __forceinline__ float of_c(float x) {
    if constexpr (std::is_same_v<T, float>) return float_tanh(x);
    // As above, and without a branch.
    const float square = x * x;
    float series = -17.0f / 315 * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = series * square * x + x;
    const float other = 1.0f - 2.0f * hopper::fast_reciprocal(1.0f + hopper::fast_exp(2 * x));
    return fabsf(x) < 0.25f ? series : other;
  }
};

}  // namespace
}  // namespace tch_extension::recurrent
