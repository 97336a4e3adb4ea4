// One step's vectors of the CPU, from memory to memory, for both of its paths. The formulas are the
// cell's.
#pragma once

#include "../../lltm_cell/cpu_pointwise.h"
#include "tch_extension/cpu.h"

namespace tch_extension::recurrent {
inline namespace CPU_CAPABILITY {

// Before their activations.
template <typename T>
struct LltmGates {
  Vec<T> i, o, g;
};

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

template <typename T>
inline void lltm_forward(const LltmGates<T>& gates, const LltmPlace<T>& place) {
  const LltmCellStep<T> step(gates.i, gates.o, gates.g, load(place.c, place.count));
  store(step.new_c, place.new_c, place.count);
  store(step.new_h, place.new_h, place.count);
  if (place.activations == nullptr) return;
  store(step.i, place.activations, place.count);
  store(step.o, place.activations + place.hidden, place.count);
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
  const LltmCellGradient<T> grad(
      load(place.activations, place.count), load(place.activations + place.hidden, place.count),
      load(place.activations + 2 * place.hidden, place.count), load(place.new_c, place.count),
      grad_h, load(place.grad_c, place.count));
  store(grad.i, place.grad_gates, place.count);
  store(grad.o, place.grad_gates + place.hidden, place.count);
  store(grad.g, place.grad_gates + 2 * place.hidden, place.count);
  store(grad.c, place.grad_c, place.count);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent
