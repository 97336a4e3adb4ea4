// An LSTM's step on the CPU.
#pragma once

#include "cpu.h"
#include "lstm.h"

namespace tch_extension::recurrent {
inline namespace CPU_CAPABILITY {

struct LstmOnCpu : Lstm {
  template <typename T>
  static void forward(const Vec<T> (&gates)[kGates], const Vec<T>*, const ForwardPlace<T>& place) {
    const int64_t hidden = place.hidden, count = place.count;
    const Vec<T> i = sigmoid(gates[0]), f = sigmoid(gates[1]), g = tanh(gates[2]),
                 o = sigmoid(gates[3]);
    const Vec<T> c = f * load(place.state, count) + i * g;
    store(c, place.new_state, count);
    store(o * tanh(c), place.new_h, count);
    if (place.saved == nullptr) return;
    store(i, place.saved, count);
    store(f, place.saved + hidden, count);
    store(g, place.saved + 2 * hidden, count);
    store(o, place.saved + 3 * hidden, count);
  }

  template <typename T>
  static void backward(const Vec<T>& grad_h, const BackwardPlace<T>& place) {
    const int64_t hidden = place.hidden, count = place.count;
    const Vec<T> one(T(1));
    const Vec<T> i = load(place.saved, count), f = load(place.saved + hidden, count),
                 g = load(place.saved + 2 * hidden, count),
                 o = load(place.saved + 3 * hidden, count);
    const Vec<T> c = load(place.state, count), tanh_c = tanh(load(place.new_state, count));
    const Vec<T> grad_c = load(place.grad_state, count) + grad_h * o * (one - tanh_c * tanh_c);
    store(grad_c * g * i * (one - i), place.grad_gates, count);
    store(grad_c * c * f * (one - f), place.grad_gates + hidden, count);
    store(grad_c * i * (one - g * g), place.grad_gates + 2 * hidden, count);
    store(grad_h * tanh_c * o * (one - o), place.grad_gates + 3 * hidden, count);
    store(grad_c * f, place.grad_state, count);
  }
};

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent
