// A GRU's step on the CPU.
#pragma once

#include "cpu.h"
#include "gru.h"

namespace tch_extension::recurrent {
inline namespace CPU_CAPABILITY {

struct GruOnCpu : Gru {
  template <typename T>
  static void forward(const Vec<T> (&gates)[kGates], const Vec<T>* separate,
                      const ForwardPlace<T>& place) {
    const Vec<T> r = sigmoid(gates[0]), z = sigmoid(gates[1]), hn = separate[0];
    const Vec<T> n = tanh(gates[2] + r * hn);
    // This is n + z (h - n), which keeps h where z is 1.
    const Vec<T> h = load(place.state, place.count);
    store(n + z * (h - n), place.new_h, place.count);
    if (place.saved == nullptr) return;
    store(r, place.saved, place.count);
    store(z, place.saved + place.hidden, place.count);
    store(n, place.saved + 2 * place.hidden, place.count);
    store(hn, place.saved + 3 * place.hidden, place.count);
  }

  // `grad_h` does not include what the next step passed on directly, which is in grad_state.
  template <typename T>
  static void backward(const Vec<T>& grad_h, const BackwardPlace<T>& place) {
    const int64_t hidden = place.hidden, count = place.count;
    const Vec<T> one(T(1));
    const Vec<T> r = load(place.saved, count), z = load(place.saved + hidden, count),
                 n = load(place.saved + 2 * hidden, count),
                 hn = load(place.saved + 3 * hidden, count), h = load(place.state, count);
    const Vec<T> grad = grad_h + load(place.grad_state, count);
    const Vec<T> grad_n = grad * (one - z) * (one - n * n);
    store(grad_n * hn * r * (one - r), place.grad_gates, count);
    store(grad * (h - n) * z * (one - z), place.grad_gates + hidden, count);
    store(grad_n * r, place.grad_gates + 2 * hidden, count);
    store(grad_n, place.grad_separate, count);
    store(grad * z, place.grad_state, count);
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent
