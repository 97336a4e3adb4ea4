// Activation functions for float without a branch. They are at most 4 units in the last place from
// the exact value (tanh 2, elu 3); results below the smallest normal number may be 0. CUDA's own
// functions are within 1 to 3.5 units, but all lanes of a warp wait for the branches of any lane.
#pragma once

#include <cmath>

#include "../../hopper/approximate.h"

namespace tch_extension::recurrent {

__device__ __forceinline__ float float_sigmoid(float x) {
  return hopper::fast_reciprocal(1.0f + std::exp(-x));
}

__device__ __forceinline__ float float_elu(float x) {
  // Near 0, exp(x) - 1 loses digits; this is the best polynomial of its degree there.
  float near = 0.001164287f * x + 0.008238221f;
  near = near * x + 0.04164993f;
  near = near * x + 0.16666563f;
  near = near * x + 0.5f;
  near = near * x * x + x;
  const float below = x > -0.5f ? near : std::exp(x) - 1.0f;
  return x > 0 ? x : below;
}

__device__ __forceinline__ float float_tanh(float x) {
  // Near 0 this is a polynomial, too, here of the square.
  const float square = x * x;
  float near = -0.006610228f * square + 0.021309389f;
  near = near * square - 0.05390943f;
  near = near * square + 0.13333113f;
  near = near * square - 0.33333332f;
  near = near * square * x + x;
  const float far = 1.0f - 2.0f * hopper::fast_reciprocal(1.0f + std::exp(2.0f * std::fabs(x)));
  return std::fabs(x) < 0.55f ? near : std::copysign(far, x);
}

}  // namespace tch_extension::recurrent
