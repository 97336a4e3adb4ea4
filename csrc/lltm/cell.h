// One step's formulas on vectors of the CPU, for both of its paths.
#pragma once

#include "tch_extension/cpu.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

template <typename T>
struct LltmActivations {
  Vec<T> i, o, g;  // σ(i), σ(o), g
};

template <typename T>
inline Vec<T> lltm_sigmoid(const Vec<T>& x) {
  return Vec<T>(T(1)) / (Vec<T>(T(1)) + x.neg().exp());
}

template <typename T>
inline Vec<T> lltm_candidate(const Vec<T>& g) {
  return Vec<T>::blendv(g.expm1(), g, g > Vec<T>(T(0)));
}

// Where a step reads and writes; `count` neighbouring columns of a row. `activations` may be null.
template <typename T>
struct LltmPlace {
  const T* c;
  T* new_h;
  T* new_c;
  T* activations;
  int64_t hidden;
  int64_t count;
};

// From the gates before their activations.
template <typename T>
inline void lltm_forward(const LltmActivations<T>& gates, const LltmPlace<T>& place) {
  const Vec<T> i = lltm_sigmoid<T>(gates.i);
  const Vec<T> o = lltm_sigmoid<T>(gates.o);
  const Vec<T> new_c = load(place.c, place.count) + lltm_candidate<T>(gates.g) * i;
  store(new_c, place.new_c, place.count);
  store(new_c.tanh() * o, place.new_h, place.count);
  if (place.activations == nullptr) return;
  store(i, place.activations, place.count);
  store(o, place.activations + place.hidden, place.count);
  store(gates.g, place.activations + 2 * place.hidden, place.count);
}

template <typename T>
struct LltmGradPlace {
  const T* activations;
  const T* new_c;
  T* grad_c;
  T* grad_gates;
  int64_t hidden;
  int64_t count;
};

// From the gradient for h.
template <typename T>
inline void lltm_backward(const Vec<T>& grad_h, const LltmGradPlace<T>& place) {
  using V = Vec<T>;
  const V one(T(1));
  const V i = load(place.activations, place.count);
  const V o = load(place.activations + place.hidden, place.count);
  const V g = load(place.activations + 2 * place.hidden, place.count);
  const V tanh_c = load(place.new_c, place.count).tanh();
  const V grad_c = load(place.grad_c, place.count) + grad_h * o * (one - tanh_c * tanh_c);
  const V candidate_grad = V::blendv(g.exp(), one, g > V(T(0)));
  store(grad_c * lltm_candidate<T>(g) * i * (one - i), place.grad_gates, place.count);
  store(grad_h * tanh_c * o * (one - o), place.grad_gates + place.hidden, place.count);
  store(grad_c * i * candidate_grad, place.grad_gates + 2 * place.hidden, place.count);
  store(grad_c, place.grad_c, place.count);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
