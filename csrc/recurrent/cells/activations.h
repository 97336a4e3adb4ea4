// The activation functions of LLTM's gates on CUDA, for each kind of product.
#pragma once

#include <type_traits>

#include "float_functions.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {
namespace {

// T is the kind of the product. For half kinds and tf32 these functions are fast, and as precise as
// those kinds require; for float they have the precision of float, and for double they are exact.
template <typename T, typename G>
struct Activation {
  static __device__ __forceinline__ G sigmoid(G x) { return tch_extension::sigmoid(x); }
  static __device__ __forceinline__ G elu(G x) { return tch_extension::elu(x); }
  static __device__ __forceinline__ G elu_grad(G x) { return tch_extension::elu_grad(x); }
  static __device__ __forceinline__ G tanh(G x) { return std::tanh(x); }
};

template <typename T>
struct Activation<T, float> {
  static __device__ __forceinline__ float sigmoid(float x) {
    if constexpr (std::is_same_v<T, float>) return float_sigmoid(x);
    return hopper::fast_reciprocal(1.0f + hopper::fast_exp(-x));
  }

  static __device__ __forceinline__ float elu(float x) {
    if constexpr (std::is_same_v<T, float>) return float_elu(x);
    // exp(x) - 1 loses its digits near 0, where a few terms of the series are enough.
    float series = 1.0f / 120 * x + 1.0f / 24;
    series = series * x + 1.0f / 6;
    series = series * x + 0.5f;
    series = series * x * x + x;
    const float negative = x > -0.25f ? series : hopper::fast_exp(x) - 1.0f;
    return x > 0 ? x : negative;
  }

  static __device__ __forceinline__ float elu_grad(float x) {
    if constexpr (std::is_same_v<T, float>) return tch_extension::elu_grad(x);
    return x > 0 ? 1.0f : hopper::fast_exp(x);
  }

  static __device__ __forceinline__ float tanh(float x) {
    if constexpr (std::is_same_v<T, float>) return float_tanh(x);
    // Near 0 a series is used, as above; here without a branch.
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
