// The functions of the gates on vectors, on the CPU.
#pragma once

#include "tch_extension/cpu.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// exp(x). For Float it is off by little more than one unit in the last place; results below the
// smallest normal number are 0, and those above 2^127.5 are infinite. libtorch's is a call of a
// function, before which the compiler stores all vectors that it has in registers.
template <typename C>
inline Vec<C> exp(const Vec<C>& x) {
  if constexpr (std::is_same_v<C, float>) {
    using at::vec::fmadd;
    using V = Vec<float>;
    using Bits = at::vec::Vectorized<int32_t>;
    // exp(x) = 2^n exp(r), where n is the nearest integer to x / ln 2. Adding kRound leaves n in
    // the lowest bits. ln 2 has two parts, the first of which has few digits, so that its product
    // with n is exact.
    constexpr float kRound = 1.5f * (1 << 23), kPerLn2 = 1.442695041f;
    constexpr float kLn2 = 0.693359375f, kLn2Rest = -2.12194440e-4f;
    // Within these bounds the exponent stays within its bits: n of -127 makes the power 0, and n of
    // 128 makes it infinite. A NaN passes.
    const V bounded = at::vec::clamp(x, V(-88.0f), V(89.0f));
    const V rounded = fmadd(bounded, V(kPerLn2), V(kRound));
    const V n = rounded - V(kRound);
    const V r = fmadd(n, V(-kLn2Rest), fmadd(n, V(-kLn2), bounded));
    V series(1.9875691500e-4f);
    for (const float term : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                             5.0000001201e-1f}) {
      series = fmadd(series, r, V(term));
    }
    series = fmadd(series * r, r, r) + V(1.0f);
    const Bits exponent = (at::vec::cast<int32_t>(rounded) << Bits(23)) + Bits(0x3f800000);
    return series * at::vec::cast<float>(exponent);
  } else {
    return x.exp();
  }
}

template <typename C>
inline Vec<C> sigmoid(const Vec<C>& x) {
  return Vec<C>(C(1)) / (Vec<C>(C(1)) + exp(x.neg()));
}

// exp(x) - 1 for x <= 0, given exp(x). For Float, libtorch's expm1 costs as much as four
// exponentials; this function is off by at most two units in the last place. Close to 0, where the
// difference would lose its digits, it uses the Taylor series.
template <typename C>
inline Vec<C> expm1_of_negative(const Vec<C>& x, const Vec<C>& exp) {
  if constexpr (std::is_same_v<C, float>) {
    using at::vec::fmadd;
    using V = Vec<float>;
    V series(1.0f / 40320);
    for (const float factor :
         {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2}) {
      series = fmadd(series, x, V(factor));
    }
    return V::blendv(exp - V(1.0f), fmadd(series * x, x, x), x > V(-0.5f));
  } else {
    return x.expm1();
  }
}

// tanh. For Float it is off by at most two units in the last place: near 0 it is the best
// polynomial of its degree, as in float_functions.h.
template <typename C>
inline Vec<C> tanh(const Vec<C>& x) {
  if constexpr (std::is_same_v<C, float>) {
    using at::vec::fmadd;
    using V = Vec<float>;
    const V size = x.abs(), square = x * x, one(1.0f);
    V series(-0.006610228f);
    for (const float term : {0.021309389f, -0.05390943f, 0.13333113f, -0.33333332f}) {
      series = fmadd(series, square, V(term));
    }
    const V near = fmadd(series * square, size, size);
    const V far = one - V(2.0f) / (one + exp(size + size));
    return V::blendv(far, near, size < V(0.55f)) ^ (x & V(-0.0f));
  } else {
    return x.tanh();
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
