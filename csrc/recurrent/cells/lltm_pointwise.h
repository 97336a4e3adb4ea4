// LLTM's formulas on vectors of gates, on the CPU: for the operator lltm_cell and for lltm_cpu.h.
#pragma once

#include "tch_extension/cpu.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

template <typename C>
inline Vec<C> sigmoid(const Vec<C>& x) {
  return Vec<C>(C(1)) / (Vec<C>(C(1)) + x.neg().exp());
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

// tanh. For Float it uses expm1_of_negative, for the same reason.
template <typename C>
inline Vec<C> tanh(const Vec<C>& x) {
  if constexpr (std::is_same_v<C, float>) {
    using V = Vec<float>;
    const V twice = x.abs() * V(-2.0f);
    const V difference = expm1_of_negative(twice, twice.exp());
    return (difference.abs() / (V(2.0f) + difference)) ^ (x & V(-0.0f));
  } else {
    return x.tanh();
  }
}

// One vector of the cell's step, forward.
template <typename C>
struct LltmCellStep {
  Vec<C> i, o;  // after their sigmoids
  Vec<C> new_h, new_c;

  LltmCellStep(const Vec<C>& gate_i, const Vec<C>& gate_o, const Vec<C>& g, const Vec<C>& c)
      : i(sigmoid(gate_i)), o(sigmoid(gate_o)) {
    const Vec<C> candidate = Vec<C>::blendv(expm1_of_negative(g, g.exp()), g, g > Vec<C>(C(0)));
    new_c = c + candidate * i;
    new_h = tanh(new_c) * o;
  }
};

// One vector of the gradients of the cell's step.
template <typename C>
struct LltmCellGradient {
  Vec<C> i, o, g;  // for the gates before their activations
  Vec<C> c;

  LltmCellGradient(const Vec<C>& i, const Vec<C>& o, const Vec<C>& g, const Vec<C>& new_c,
                   const Vec<C>& grad_new_h, const Vec<C>& grad_new_c) {
    const Vec<C> one(C(1));
    const Vec<C> tanh_c = tanh(new_c);
    const Vec<C> positive = g > Vec<C>(C(0));
    const Vec<C> exp = g.exp();
    const Vec<C> candidate = Vec<C>::blendv(expm1_of_negative(g, exp), g, positive);
    const Vec<C> candidate_grad = Vec<C>::blendv(exp, one, positive);
    c = grad_new_c + grad_new_h * o * (one - tanh_c * tanh_c);
    this->i = c * candidate * i * (one - i);
    this->o = grad_new_h * tanh_c * o * (one - o);
    this->g = c * i * candidate_grad;
  }
};

template <typename T>
inline Vec<Compute<T>> load_or_zero(const void* pointer, int64_t at, int64_t count) {
  return pointer == nullptr ? Vec<Compute<T>>(0) : load(static_cast<const T*>(pointer) + at, count);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
