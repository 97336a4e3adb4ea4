// LLTM's step on CUDA, on registers. cell.h describes what a cell is; F are the activation
// functions in the precision that the kernel needs (activations.h), G is the type of the sums.
#pragma once

#include "lltm.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent {

struct LltmOnCuda : Lltm {
  template <typename F, typename G>
  static __device__ __forceinline__ void forward(const G (&gates)[kGates], const G*, G& c, G& h,
                                                 G (&saved)[kSaved]) {
    saved[0] = F::sigmoid(gates[0]);
    saved[1] = F::sigmoid(gates[1]);
    c += F::elu(gates[2]) * saved[0];
    h = F::tanh(c) * saved[1];
  }

  // The factors of the gradient for h (for c and for o), and of the gradient for c (for i and for
  // g).
  template <typename G>
  struct Factors {
    G c_of_h, i_of_c, o_of_h, g_of_c;
  };

  template <typename F, typename G, typename S>
  static __device__ __forceinline__ Factors<G> factors(const S (&saved)[kSaved], S new_c, S) {
    const G tanh_c = F::tanh(static_cast<G>(new_c));
    const G i = static_cast<G>(saved[0]), o = static_cast<G>(saved[1]),
            g = static_cast<G>(saved[2]);
    Factors<G> of;
    of.c_of_h = o * tanh_grad(tanh_c);
    of.i_of_c = F::elu(g) * sigmoid_grad(i);
    of.o_of_h = tanh_c * sigmoid_grad(o);
    of.g_of_c = i * F::elu_grad(g);
    return of;
  }

  template <typename G>
  static __device__ __forceinline__ void add_to_state(const Factors<G>& of, G grad_h, G& grad_c) {
    grad_c += grad_h * of.c_of_h;
  }

  template <typename G>
  static __device__ __forceinline__ G before_step(const Factors<G>&, G grad_c) {
    return grad_c;
  }

  template <typename G>
  static __device__ __forceinline__ G separate_gradient(const Factors<G>&, G) {
    return 0;
  }

  template <int kGate, typename G>
  static __device__ __forceinline__ G gate_gradient(const Factors<G>& of, G grad_h, G grad_c) {
    if constexpr (kGate == 0) return grad_c * of.i_of_c;
    if constexpr (kGate == 1) return grad_h * of.o_of_h;
    if constexpr (kGate == 2) return grad_c * of.g_of_c;
  }
};

}  // namespace tch_extension::recurrent
