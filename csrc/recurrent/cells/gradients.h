// The gradients for all gates of a cell, of one column or of two.
#pragma once

#include <utility>

namespace tch_extension::recurrent {
namespace {

template <typename Cell, typename Factors, typename G, int... kGate>
__device__ __forceinline__ void gate_gradients(const Factors& of, G grad_h, G grad_c,
                                               G (&to)[Cell::kGates],
                                               std::integer_sequence<int, kGate...>) {
  ((to[kGate] = Cell::template gate_gradient<kGate>(of, grad_h, grad_c)), ...);
}

template <typename Cell, typename Factors, typename G>
__device__ __forceinline__ void gate_gradients(const Factors& of, G grad_h, G grad_c,
                                               G (&to)[Cell::kGates]) {
  gate_gradients<Cell>(of, grad_h, grad_c, to, std::make_integer_sequence<int, Cell::kGates>{});
}

// The gradients of two columns, gate by gate.
template <typename Cell, typename Factors, typename Pair, typename G, int... kGate>
__device__ __forceinline__ void gate_gradients(const Factors& first, const Factors& second,
                                               const Pair& grad_h, const Pair& grad_c,
                                               G (&to)[Cell::kGates][2],
                                               std::integer_sequence<int, kGate...>) {
  ((to[kGate][0] = Cell::template gate_gradient<kGate>(first, grad_h.x, grad_c.x),
    to[kGate][1] = Cell::template gate_gradient<kGate>(second, grad_h.y, grad_c.y)),
   ...);
}

template <typename Cell, typename Factors, typename Pair, typename G>
__device__ __forceinline__ void gate_gradients(const Factors& first, const Factors& second,
                                               const Pair& grad_h, const Pair& grad_c,
                                               G (&to)[Cell::kGates][2]) {
  gate_gradients<Cell>(first, second, grad_h, grad_c, to,
                       std::make_integer_sequence<int, Cell::kGates>{});
}

}  // namespace
}  // namespace tch_extension::recurrent
