// One step of LLTM on CUDA, after its product in the forward pass or before it in the backward
// pass. Each thread computes kLanes adjacent columns of one row. A step's arrays fit in the L2
// cache, and the cost of a small step is its launch.

#pragma once

#include "params.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

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

// A gate before its activation.
template <typename G, int kLanes>
__device__ __forceinline__ Values<G, kLanes> gate(const ForwardParams& params, int64_t at,
                                                  int64_t column) {
  auto sum = load_values<G, kLanes>(params.input_gates, at);
  const auto from_hidden = load_values<G, kLanes>(params.hidden_gates, at);
  const auto bias = load_or_zero<G, kLanes>(params.bias, column);
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane)
    sum.lane[lane] += from_hidden.lane[lane] + bias.lane[lane];
  return sum;
}

// Index is 32 bits wide where the sizes allow it, because a 64-bit division costs more than the
// arithmetic.
template <typename K, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads) forward_kernel(ForwardParams params) {
  using std::tanh;
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
    const int64_t at_gates = at + 2 * hidden * row;
    const auto gate_i = gate<G, kLanes>(params, at_gates, column);
    const auto gate_o = gate<G, kLanes>(params, at_gates + hidden, column + hidden);
    const auto gate_g = gate<G, kLanes>(params, at_gates + 2 * hidden, column + 2 * hidden);
    auto c = load_values<S, kLanes>(params.c, at);
    Values<S, kLanes> i, o, g, h;
    Values<P, kLanes> operand;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      i.lane[lane] = sigmoid(gate_i.lane[lane]);
      o.lane[lane] = sigmoid(gate_o.lane[lane]);
      g.lane[lane] = gate_g.lane[lane];
      c.lane[lane] += elu(g.lane[lane]) * i.lane[lane];
      h.lane[lane] = tanh(c.lane[lane]) * o.lane[lane];
      operand.lane[lane] = h.lane[lane];
    }
    store_values<S>(params.new_c, at, c);
    store_values<S>(params.new_h, at, h);
    if (params.operand != nullptr) store_values<P>(params.operand, at, operand);
    if (params.activations != nullptr) {
      store_values<S>(params.activations, at_gates, i);
      store_values<S>(params.activations, at_gates + hidden, o);
      store_values<S>(params.activations, at_gates + 2 * hidden, g);
    }
  }
}

template <typename K, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads) backward_kernel(BackwardParams params) {
  using std::tanh;
  using S = typename K::State;
  using P = typename K::Product;
  using G = typename K::Gates;
  const Index vectors_per_row = static_cast<Index>(params.hidden / kLanes);
  const Index vectors = static_cast<Index>(params.batch) * vectors_per_row;
  const int64_t hidden = params.hidden;
  for (Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<Index>(gridDim.x) * kThreads) {
    const int64_t at = static_cast<int64_t>(index) * kLanes;
    const int64_t at_gates = at + 2 * hidden * static_cast<int64_t>(index / vectors_per_row);
    const auto i = load_values<S, kLanes>(params.activations, at_gates);
    const auto o = load_values<S, kLanes>(params.activations, at_gates + hidden);
    const auto g = load_values<S, kLanes>(params.activations, at_gates + 2 * hidden);
    const auto new_c = load_values<S, kLanes>(params.new_c, at);
    const auto grad_output = load_or_zero<S, kLanes>(params.grad_output, at);
    const auto from_next_step = load_or_zero<G, kLanes>(params.grad_h, at);
    auto grad_c = load_values<G, kLanes>(params.grad_c, at);
    Values<P, kLanes> grad_i, grad_o, grad_g;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto tanh_c = tanh(new_c.lane[lane]);
      const auto grad_h = grad_output.lane[lane] + from_next_step.lane[lane];
      grad_c.lane[lane] += grad_h * o.lane[lane] * tanh_grad(tanh_c);
      grad_i.lane[lane] = grad_c.lane[lane] * elu(g.lane[lane]) * sigmoid_grad(i.lane[lane]);
      grad_o.lane[lane] = grad_h * tanh_c * sigmoid_grad(o.lane[lane]);
      grad_g.lane[lane] = grad_c.lane[lane] * i.lane[lane] * elu_grad(g.lane[lane]);
    }
    store_values<P>(params.grad_gates, at_gates, grad_i);
    store_values<P>(params.grad_gates, at_gates + hidden, grad_o);
    store_values<P>(params.grad_gates, at_gates + 2 * hidden, grad_g);
    store_values<G>(params.grad_c, at, grad_c);
  }
}

// Whether all addresses and rows are multiples of a 16-byte vector of the gates' type; the other
// types are no wider.
template <int kLanes>
bool allows_vectors(const ForwardParams& params) {
  return params.hidden % kLanes == 0 && is_aligned_to_16(params.input_gates) &&
         is_aligned_to_16(params.hidden_gates) && is_aligned_to_16(params.bias) &&
         is_aligned_to_16(params.c) && is_aligned_to_16(params.new_h) &&
         is_aligned_to_16(params.new_c) && is_aligned_to_16(params.operand) &&
         is_aligned_to_16(params.activations);
}

template <int kLanes>
bool allows_vectors(const BackwardParams& params) {
  return params.hidden % kLanes == 0 && is_aligned_to_16(params.grad_output) &&
         is_aligned_to_16(params.grad_h) && is_aligned_to_16(params.grad_c) &&
         is_aligned_to_16(params.activations) && is_aligned_to_16(params.new_c) &&
         is_aligned_to_16(params.grad_gates);
}

template <typename K, int kLanes, typename Index>
void start(const ForwardParams& params, unsigned int blocks, cudaStream_t stream) {
  forward_kernel<K, kLanes, Index><<<blocks, kThreads, 0, stream>>>(params);
}

template <typename K, int kLanes, typename Index>
void start(const BackwardParams& params, unsigned int blocks, cudaStream_t stream) {
  backward_kernel<K, kLanes, Index><<<blocks, kThreads, 0, stream>>>(params);
}

template <typename Params>
bool fits_32_bits(const Params& params) {
  // The loop adds the size of the grid to an index below the end; the sum must not overflow.
  return params.batch * 3 * params.hidden < INT32_MAX / 2;
}

template <typename K, int kLanes, typename Params>
void start_with_index(const Params& params, cudaStream_t stream) {
  const unsigned int blocks = blocks_for(params.batch * params.hidden / kLanes);
  fits_32_bits(params) ? start<K, kLanes, uint32_t>(params, blocks, stream)
                       : start<K, kLanes, int64_t>(params, blocks, stream);
}

template <typename Params>
LaunchStatus launch(const char* kernel, const Params& params, cudaStream_t stream) {
  if (params.batch == 0 || params.hidden == 0) return {kernel, nullptr};
  for_kinds(params.kind, params.product_kind, [&](auto kinds) {
    using K = decltype(kinds);
    constexpr int kLanes = kLanesOf16Bytes<typename K::Gates>;
    allows_vectors<kLanes>(params) ? start_with_index<K, kLanes>(params, stream)
                                   : start_with_index<K, 1>(params, stream);
  });
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension::recurrent::step
