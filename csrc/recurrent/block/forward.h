// All steps of a small layer forward; params.h says how threads share them.
#pragma once

#include "../cells/activations.h"
#include "team.h"

namespace tch_extension::recurrent::block {
namespace {

// A thread's part of the weights of its column's gates: those of h, or those of the input.
template <typename T, typename Team, typename G, int kGates>
__device__ void load_weights(G (&to)[kGates][Team::kTerms], const void* weight, const Team& team,
                             int hidden, int columns) {
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    const T* row = static_cast<const T*>(weight) +
                   (static_cast<int64_t>(gate) * hidden + team.column) * columns;
#pragma unroll
    for (int term = 0; term < Team::kTerms; ++term) {
      const int at = team.first_term + term;
      to[gate][term] =
          team.column < hidden && at < columns ? static_cast<G>(row[at]) : static_cast<G>(0);
    }
  }
}

template <typename Cell, typename T, int kSize>
__global__ void __launch_bounds__(Team<kSize>::kThreads)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using G = Compute<T>;
  using Team = Team<kSize>;
  constexpr int kGates = Cell::kGates, kSeparate = Cell::kSeparate, kSums = kGates - kSeparate;
  constexpr int kSaved = Cell::kSaved, kTerms = Team::kTerms;
  static_assert(kSaved <= kParts, "each thread of a column stores one saved value");
  __shared__ __align__(16) G h[2][kSize], x[2][kSize];
  const Team team;
  const int hidden = static_cast<int>(params.hidden), features = static_cast<int>(params.features);
  const int column = team.column, thread = static_cast<int>(threadIdx.x);
  const bool is_there = column < hidden;
  G of_h[kGates][kTerms], of_x[kGates][kTerms], bias[kGates], separate_bias[kSeparate + 1] = {};
  load_weights<T>(of_h, params.w_hh, team, hidden, hidden);
  load_weights<T>(of_x, params.w_ih, team, hidden, features);
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    auto value_of = [&](const void* biases) {
      return biases == nullptr || !is_there
                 ? static_cast<G>(0)
                 : static_cast<G>(static_cast<const T*>(biases)[gate * hidden + column]);
    };
    bias[gate] = value_of(params.b_ih);
    const G other = value_of(params.b_hh);
    if (gate < kSums) {
      bias[gate] += other;
    } else {
      separate_bias[gate - kSums] = other;
    }
  }
  for (int64_t row = blockIdx.x; row < params.batch; row += gridDim.x) {
    const int64_t of_row = row * hidden + column;
    const T* input = static_cast<const T*>(params.input) + row * features + thread;
    auto input_at = [&](int64_t step) {
      return thread < features && step < params.steps
                 ? static_cast<G>(input[step * params.batch * features])
                 : static_cast<G>(0);
    };
    G last_h = is_there ? static_cast<G>(static_cast<const T*>(params.h0)[of_row]) : G(0);
    G state = last_h;
    if (!Cell::kStateIsH && is_there)
      state = static_cast<G>(static_cast<const T*>(params.c0)[of_row]);
    G ahead[kAhead];
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) ahead[slot] = input_at(1 + slot);
    // The last row's last step may still be read.
    Team::wait();
    if (team.part == 0) h[0][column] = last_h;
    if (thread < kSize) x[0][thread] = input_at(0);
    Team::wait();
    for (int64_t first = 0; first < params.steps; first += kAhead) {
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        const int64_t step = first + slot;
        if (step >= params.steps) break;
        constexpr int kBuffers = 2;
        const int now = slot % kBuffers, next = 1 - now;
        G hs[kTerms], xs[kTerms], gates[kGates] = {}, separate[kSeparate + 1] = {};
        load_terms(hs, &h[now][team.first_term]);
        load_terms(xs, &x[now][team.first_term]);
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          G& sum_of_h = gate < kSums ? gates[gate] : separate[gate < kSums ? 0 : gate - kSums];
#pragma unroll
          for (int term = 0; term < kTerms; ++term) {
            gates[gate] += of_x[gate][term] * xs[term];
            sum_of_h += of_h[gate][term] * hs[term];
          }
        }
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate)
          gates[gate] = sum_of_parts(gates[gate]) + bias[gate];
#pragma unroll
        for (int gate = 0; gate < kSeparate; ++gate)
          separate[gate] = sum_of_parts(separate[gate]) + separate_bias[gate];
        G saved[kSaved];
        Cell::template forward<Activation<T, G>>(gates, separate, state, last_h, saved);
        if (team.part == 0) h[next][column] = is_there ? last_h : G(0);
        if (thread < kSize) x[next][thread] = ahead[slot];
        Team::wait();
        ahead[slot] = input_at(step + 1 + kAhead);
        if (!is_there) continue;
        const int64_t at = step * params.batch * hidden + of_row;
        if (team.part == 0) static_cast<T*>(params.output)[at] = static_cast<T>(last_h);
        if (!Cell::kStateIsH && team.part == 1 && params.c_stride != 0)
          static_cast<T*>(params.c)[at] = static_cast<T>(state);
        if (params.activations != nullptr && team.part < kSaved) {
#pragma unroll
          for (int value = Cell::kActivated; value < kSaved; ++value) saved[value] = gates[value];
          static_cast<T*>(params.activations)[kSaved * (at - column) + team.part * hidden +
                                              column] = static_cast<T>(select(saved, team.part));
        }
      }
    }
    if (!is_there || team.part != 0) continue;
    static_cast<T*>(params.last_h)[of_row] = static_cast<T>(last_h);
    void* last_c = params.c_stride == 0 ? params.c : params.last_c;
    if (!Cell::kStateIsH) static_cast<T*>(last_c)[of_row] = static_cast<T>(state);
  }
}

template <typename Cell>
LaunchStatus forward(const char* kernel, const ForwardParams& params, cudaStream_t stream) {
  const int64_t columns = params.hidden > params.features ? params.hidden : params.features;
  const char* error = for_kernels(params.kind, columns, [&](auto of) {
    using Of = decltype(of);
    forward_kernel<Cell, typename Of::Element, Of::kSize>
        <<<params.blocks, Team<Of::kSize>::kThreads, 0, stream>>>(params);
  });
  return error == nullptr ? launch_status(kernel) : LaunchStatus{kernel, error};
}

}  // namespace
}  // namespace tch_extension::recurrent::block
