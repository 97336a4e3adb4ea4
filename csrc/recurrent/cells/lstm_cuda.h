// An LSTM's step on CUDA, on registers. cell.h describes what a cell is.
#pragma once

#include "lstm.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {

struct LstmOnCuda : Lstm {
  template <typename F, typename G>
  static __device__ __forceinline__ void forward(const G (&gates)[kGates], const G*, G& c, G& h,
                                                 G (&saved)[kSaved]) {
    saved[0] = F::sigmoid(gates[0]);
    saved[1] = F::sigmoid(gates[1]);
    saved[2] = F::tanh(gates[2]);
    saved[3] = F::sigmoid(gates[3]);
    c = saved[1] * c + saved[0] * saved[2];
    h = saved[3] * F::tanh(c);
  }

  // The factors of the gradient for h (for c and for o), and of the gradient for c.
  template <typename G>
  struct Factors {
    G c_of_h, o_of_h, i_of_c, f_of_c, g_of_c, previous_of_c;
  };

  template <typename F, typename G, typename S>
  static __device__ __forceinline__ Factors<G> factors(const S (&saved)[kSaved], S new_c,
                                                       S previous_c) {
    const G tanh_c = F::tanh(static_cast<G>(new_c));
    const G i = static_cast<G>(saved[0]), f = static_cast<G>(saved[1]),
            g = static_cast<G>(saved[2]), o = static_cast<G>(saved[3]);
    Factors<G> of;
    of.c_of_h = o * tanh_grad(tanh_c);
    of.o_of_h = tanh_c * sigmoid_grad(o);
    of.i_of_c = g * sigmoid_grad(i);
    of.f_of_c = static_cast<G>(previous_c) * sigmoid_grad(f);
    of.g_of_c = i * tanh_grad(g);
    of.previous_of_c = f;
    return of;
  }

  template <typename G>
  static __device__ __forceinline__ void add_to_state(const Factors<G>& of, G grad_h, G& grad_c) {
    grad_c += grad_h * of.c_of_h;
  }

  template <typename G>
  static __device__ __forceinline__ G before_step(const Factors<G>& of, G grad_c) {
    return grad_c * of.previous_of_c;
  }

  template <typename G>
  static __device__ __forceinline__ G separate_gradient(const Factors<G>&, G) {
    return 0;
  }

  template <int kGate, typename G>
  static __device__ __forceinline__ G gate_gradient(const Factors<G>& of, G grad_h, G grad_c) {
    if constexpr (kGate == 0) return grad_c * of.i_of_c;
    if constexpr (kGate == 1) return grad_c * of.f_of_c;
    if constexpr (kGate == 2) return grad_c * of.g_of_c;
    if constexpr (kGate == 3) return grad_h * of.o_of_h;
  }
};

}  // namespace tch_extension::recurrent
