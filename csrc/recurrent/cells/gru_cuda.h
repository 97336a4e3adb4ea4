// A GRU's step on CUDA, on registers. cell.h describes what a cell is. The state is h.
#pragma once

#include "gru.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {

struct GruOnCuda : Gru {
  template <typename F, typename G>
  static __device__ __forceinline__ void forward(const G (&gates)[kGates], const G* separate,
                                                 G& state, G& h, G (&saved)[kSaved]) {
    const G r = F::sigmoid(gates[0]), z = F::sigmoid(gates[1]), hn = separate[0];
    const G n = F::tanh(gates[2] + r * hn);
    // This is n + z (h - n), which keeps h where z is 1.
    state = h = n + z * (state - n);
    saved[0] = r;
    saved[1] = z;
    saved[2] = n;
    saved[3] = hn;
  }

  // The factors of the gradient for h after the step.
  template <typename G>
  struct Factors {
    G r, z, n, separate, previous;
  };

  template <typename F, typename G, typename S>
  static __device__ __forceinline__ Factors<G> factors(const S (&saved)[kSaved], S, S previous_h) {
    const G r = static_cast<G>(saved[0]), z = static_cast<G>(saved[1]),
            n = static_cast<G>(saved[2]), hn = static_cast<G>(saved[3]);
    Factors<G> of;
    of.separate = (1 - z) * tanh_grad(n);
    of.r = of.separate * hn * sigmoid_grad(r);
    of.z = (static_cast<G>(previous_h) - n) * sigmoid_grad(z);
    of.n = of.separate * r;
    of.previous = z;
    return of;
  }

  template <typename G>
  static __device__ __forceinline__ void add_to_state(const Factors<G>&, G grad_h, G& grad_state) {
    grad_state += grad_h;
  }

  template <typename G>
  static __device__ __forceinline__ G before_step(const Factors<G>& of, G grad_state) {
    return grad_state * of.previous;
  }

  template <typename G>
  static __device__ __forceinline__ G separate_gradient(const Factors<G>& of, G grad_state) {
    return grad_state * of.separate;
  }

  template <int kGate, typename G>
  static __device__ __forceinline__ G gate_gradient(const Factors<G>& of, G, G grad_state) {
    if constexpr (kGate == 0) return grad_state * of.r;
    if constexpr (kGate == 1) return grad_state * of.z;
    if constexpr (kGate == 2) return grad_state * of.n;
  }
};

}  // namespace tch_extension::recurrent
