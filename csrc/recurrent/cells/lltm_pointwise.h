// LLTM's formulas on vectors of gates, on the CPU: for the operator lltm_cell and for lltm_cpu.h.
#pragma once

#include "vector_functions.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// One vector of the cell's step, forward.
template <typename C>
struct LltmCellStep {
  Vec<C> i, o;  // after their sigmoids
  Vec<C> new_h, new_c;

  LltmCellStep(const Vec<C>& gate_i, const Vec<C>& gate_o, const Vec<C>& g, const Vec<C>& c)
      : i(sigmoid(gate_i)), o(sigmoid(gate_o)) {
    const Vec<C> candidate = Vec<C>::blendv(expm1_of_negative(g, exp(g)), g, g > Vec<C>(C(0)));
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
    const Vec<C> exp_g = exp(g);
    const Vec<C> candidate = Vec<C>::blendv(expm1_of_negative(g, exp_g), g, positive);
    const Vec<C> candidate_grad = Vec<C>::blendv(exp_g, one, positive);
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
