// LLTM's step on the CPU. cell.h describes what a cell is; lltm_pointwise.h has the formulas.
#pragma once

#include "cpu.h"
#include "lltm.h"

namespace tch_extension::recurrent {
inline namespace CPU_CAPABILITY {

struct LltmOnCpu : Lltm {
  template <typename T>
  static void forward(const Vec<T> (&gates)[kGates], const Vec<T>*, const ForwardPlace<T>& place) {
    const LltmCellStep<T> step(gates[0], gates[1], gates[2], load(place.state, place.count));
    store(step.new_c, place.new_state, place.count);
    store(step.new_h, place.new_h, place.count);
    if (place.saved == nullptr) return;
    store(step.i, place.saved, place.count);
    store(step.o, place.saved + place.hidden, place.count);
    store(gates[2], place.saved + 2 * place.hidden, place.count);
  }

  template <typename T>
  static void backward(const Vec<T>& grad_h, const BackwardPlace<T>& place) {
    const LltmCellGradient<T> grad(
        load(place.saved, place.count), load(place.saved + place.hidden, place.count),
        load(place.saved + 2 * place.hidden, place.count), load(place.new_state, place.count),
        grad_h, load(place.grad_state, place.count));
    store(grad.i, place.grad_gates, place.count);
    store(grad.o, place.grad_gates + place.hidden, place.count);
    store(grad.g, place.grad_gates + 2 * place.hidden, place.count);
    store(grad.c, place.grad_state, place.count);
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent
