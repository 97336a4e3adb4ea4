// One step on CUDA, after its product in the forward pass or before it in the backward pass. Each
// thread computes kLanes adjacent columns of one row. A step's arrays fit in the L2 cache, and the
// cost of a small step is its launch.

#pragma once

#include "../cells/activations.h"
#include "../cells/gradients.h"
#include "params.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"

namespace tch_extension::recurrent::step {
namespace {

// S is the state's type and P the product's. Sums have the same type for both.
template <typename S, typename P>
struct Kinds {
  using State = S;
  using Product = P;
  using Gates = Compute<P>;
};

// Calls body(Kinds<S, P>{}) for the pairs of kinds that exist: one kind for both, or, under
// autocast, a state of float with products of a half kind.
template <typename Body>
void for_kinds(int32_t state, int32_t product, Body body) {
  if (state == product) {
    for_kind(state, [&](auto type) {
      using T = typename decltype(type)::type;
      body(Kinds<T, T>{});
    });
  } else if (product == kTchExtensionHalf) {
    body(Kinds<float, __half>{});
  } else {
    body(Kinds<float, __nv_bfloat16>{});
  }
}

template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_or_zero(const void* pointer, int64_t at) {
  return pointer == nullptr ? Values<T, kLanes>{} : load_values<T, kLanes>(pointer, at);
}

template <typename T, int kLanes>
__device__ __forceinline__ void add(Values<T, kLanes>& to, const Values<T, kLanes>& more) {
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) to.lane[lane] += more.lane[lane];
}

// Index is 32 bits wide where the sizes allow it, because a 64-bit division costs more than the
// arithmetic.
template <typename Cell, typename K, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardParams params) {
  constexpr int kGates = Cell::kGates, kSums = kGates - Cell::kSeparate;
  using S = typename K::State;
  using P = typename K::Product;
  using G = typename K::Gates;
  const Index vectors_per_row = static_cast<Index>(params.hidden / kLanes);
  const Index vectors = static_cast<Index>(params.batch) * vectors_per_row;
  const int64_t hidden = params.hidden;
  for (Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<Index>(gridDim.x) * kThreads) {
    const int64_t at = static_cast<int64_t>(index) * kLanes;
    const int64_t row = static_cast<int64_t>(index / vectors_per_row);
    const int64_t column = at - row * hidden;
    const int64_t at_gates = at + (kGates - 1) * hidden * row;
    Values<G, kLanes> gates[kGates], separate[Cell::kSeparate + 1];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const int64_t of_gate = gate * hidden;
      gates[gate] = load_values<G, kLanes>(params.input_gates, at_gates + of_gate);
      add(gates[gate], load_or_zero<G, kLanes>(params.bias, column + of_gate));
      auto from_hidden = load_values<G, kLanes>(params.hidden_gates, at_gates + of_gate);
      if (gate < kSums) {
        add(gates[gate], from_hidden);
      } else {
        add(from_hidden,
            load_or_zero<G, kLanes>(params.separate_bias, column + (gate - kSums) * hidden));
        separate[gate - kSums] = from_hidden;
      }
    }
    const auto before = load_values<S, kLanes>(params.c, at);
    Values<S, kLanes> saved[Cell::kSaved], new_c, new_h;
    Values<P, kLanes> operand;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      G of_lane[kGates], separate_of_lane[Cell::kSeparate + 1], values[Cell::kSaved], h;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) of_lane[gate] = gates[gate].lane[lane];
#pragma unroll
      for (int gate = 0; gate < Cell::kSeparate; ++gate)
        separate_of_lane[gate] = separate[gate].lane[lane];
      G c = static_cast<G>(before.lane[lane]);
      Cell::template forward<Activation<G, G>>(of_lane, separate_of_lane, c, h, values);
#pragma unroll
      for (int value = 0; value < Cell::kSaved; ++value) {
        saved[value].lane[lane] = value < Cell::kActivated ? values[value] : of_lane[value];
      }
      new_c.lane[lane] = c;
      new_h.lane[lane] = h;
      operand.lane[lane] = h;
    }
    if (!Cell::kStateIsH) store_values<S>(params.new_c, at, new_c);
    store_values<S>(params.new_h, at, new_h);
    if (params.operand != nullptr) store_values<P>(params.operand, at, operand);
    if (params.activations == nullptr) continue;
    const int64_t at_saved = at + (Cell::kSaved - 1) * hidden * row;
#pragma unroll
    for (int value = 0; value < Cell::kSaved; ++value)
      store_values<S>(params.activations, at_saved + value * hidden, saved[value]);
  }
}

template <typename Cell, typename K, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads) backward_kernel(BackwardParams params) {
  constexpr int kGates = Cell::kGates;
  using S = typename K::State;
  using P = typename K::Product;
  using G = typename K::Gates;
  const Index vectors_per_row = static_cast<Index>(params.hidden / kLanes);
  const Index vectors = static_cast<Index>(params.batch) * vectors_per_row;
  const int64_t hidden = params.hidden;
  for (Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<Index>(gridDim.x) * kThreads) {
    const int64_t at = static_cast<int64_t>(index) * kLanes;
    const int64_t row = static_cast<int64_t>(index / vectors_per_row);
    const int64_t at_gates = at + (kGates - 1) * hidden * row;
    const int64_t at_saved = at + (Cell::kSaved - 1) * hidden * row;
    Values<S, kLanes> saved[Cell::kSaved], new_c = {}, c = {};
#pragma unroll
    for (int value = 0; value < Cell::kSaved; ++value)
      saved[value] = load_values<S, kLanes>(params.activations, at_saved + value * hidden);
    if (!Cell::kStateIsH) new_c = load_values<S, kLanes>(params.new_c, at);
    if (Cell::kNeedsPreviousState) c = load_values<S, kLanes>(params.previous_c, at);
    const auto grad_output = load_or_zero<S, kLanes>(params.grad_output, at);
    const auto from_next_step = load_or_zero<G, kLanes>(params.grad_h, at);
    auto grad_c = load_values<G, kLanes>(params.grad_c, at);
    Values<P, kLanes> grad_gates[kGates], grad_separate;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      G values[Cell::kSaved], grads[kGates];
#pragma unroll
      for (int value = 0; value < Cell::kSaved; ++value)
        values[value] = static_cast<G>(saved[value].lane[lane]);
      const auto factors = Cell::template factors<Activation<G, G>, G>(
          values, static_cast<G>(new_c.lane[lane]), static_cast<G>(c.lane[lane]));
      const G grad_h = static_cast<G>(grad_output.lane[lane]) + from_next_step.lane[lane];
      Cell::add_to_state(factors, grad_h, grad_c.lane[lane]);
      gate_gradients<Cell>(factors, grad_h, grad_c.lane[lane], grads);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) grad_gates[gate].lane[lane] = grads[gate];
      grad_separate.lane[lane] = Cell::separate_gradient(factors, grad_c.lane[lane]);
      grad_c.lane[lane] = Cell::before_step(factors, grad_c.lane[lane]);
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate)
      store_values<P>(params.grad_gates, at_gates + gate * hidden, grad_gates[gate]);
    if (Cell::kSeparate > 0) store_values<P>(params.grad_separate, at, grad_separate);
    store_values<G>(params.grad_c, at, grad_c);
  }
}

// Whether all addresses and rows are multiples of a 16-byte vector of the gates' type; the other
// types are no wider.
template <int kLanes>
bool allows_vectors(const ForwardParams& params) {
  return params.hidden % kLanes == 0 && is_aligned_to_16(params.input_gates) &&
         is_aligned_to_16(params.hidden_gates) && is_aligned_to_16(params.bias) &&
         is_aligned_to_16(params.separate_bias) && is_aligned_to_16(params.c) &&
         is_aligned_to_16(params.new_h) && is_aligned_to_16(params.new_c) &&
         is_aligned_to_16(params.operand) && is_aligned_to_16(params.activations);
}

template <int kLanes>
bool allows_vectors(const BackwardParams& params) {
  return params.hidden % kLanes == 0 && is_aligned_to_16(params.grad_output) &&
         is_aligned_to_16(params.grad_h) && is_aligned_to_16(params.grad_c) &&
         is_aligned_to_16(params.activations) && is_aligned_to_16(params.new_c) &&
         is_aligned_to_16(params.previous_c) && is_aligned_to_16(params.grad_separate) &&
         is_aligned_to_16(params.grad_gates);
}

template <typename Cell, typename K, int kLanes, typename Index>
void start(const ForwardParams& params, unsigned int blocks, cudaStream_t stream) {
  forward_kernel<Cell, K, kLanes, Index><<<blocks, kThreads, 0, stream>>>(params);
}

template <typename Cell, typename K, int kLanes, typename Index>
void start(const BackwardParams& params, unsigned int blocks, cudaStream_t stream) {
  backward_kernel<Cell, K, kLanes, Index><<<blocks, kThreads, 0, stream>>>(params);
}

template <typename Cell, typename Params>
bool fits_32_bits(const Params& params) {
  // The loop adds the size of the grid to an index below the end; the sum must not overflow.
  return params.batch * Cell::kGates * params.hidden < INT32_MAX / 2;
}

template <typename Cell, typename K, int kLanes, typename Params>
void start_with_index(const Params& params, cudaStream_t stream) {
  const unsigned int blocks = blocks_for(params.batch * params.hidden / kLanes);
  fits_32_bits<Cell>(params) ? start<Cell, K, kLanes, uint32_t>(params, blocks, stream)
                             : start<Cell, K, kLanes, int64_t>(params, blocks, stream);
}

template <typename Cell, typename Params>
LaunchStatus launch(const char* kernel, const Params& params, cudaStream_t stream) {
  if (params.batch == 0 || params.hidden == 0) return {kernel, nullptr};
  for_kinds(params.kind, params.product_kind, [&](auto kinds) {
    using K = decltype(kinds);
    constexpr int kLanes = kLanesOf16Bytes<typename K::Gates>;
    allows_vectors<kLanes>(params) ? start_with_index<Cell, K, kLanes>(params, stream)
                                   : start_with_index<Cell, K, 1>(params, stream);
  });
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension::recurrent::step
