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
  // h and the input of this step and of the next one.
  __shared__ __align__(16) G operands[2][2][kSize];
  const Team team;
  const int hidden = static_cast<int>(params.hidden), features = static_cast<int>(params.features);
  const int column = team.column, part = team.part;
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
  // Of a column's threads, the first has h, and the second c and the input of the next step.
  const bool keeps_c = !Cell::kStateIsH && params.c_stride != 0;
  const bool stores = is_there && (part == 0 || (part == 1 && keeps_c));
  const bool saves = is_there && part < kSaved && params.activations != nullptr;
  const bool loads = part == 1 && column < features;
  const int64_t rows = params.batch, of_step = rows * hidden;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t of_row = row * hidden + column;
    T* to = static_cast<T*>(part == 1 && keeps_c ? params.c : params.output) + of_row;
    T* to_saved = static_cast<T*>(params.activations) + (row * kSaved + part) * hidden + column;
    const T* from = static_cast<const T*>(params.input) + row * features + column;
    int64_t loaded = 0;
    auto next_input = [&] {
      const T value = loads && loaded < params.steps ? *from : T(0.0f);
      from += rows * features;
      ++loaded;
      return value;
    };
    G h = is_there ? static_cast<G>(static_cast<const T*>(params.h0)[of_row]) : G(0);
    G state = h;
    if (!Cell::kStateIsH && is_there)
      state = static_cast<G>(static_cast<const T*>(params.c0)[of_row]);
    const T first_input = next_input();
    // They are converted where they are used: a conversion waits for the load.
    T ahead[kAhead];
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) ahead[slot] = next_input();
    if (part < 2) operands[0][part][column] = part == 0 ? h : static_cast<G>(first_input);
    Team::wait();
    for (int64_t first = 0; first < params.steps; first += kAhead) {
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        if (first + slot >= params.steps) break;
        const auto& now = operands[slot % 2];
        auto& next = operands[1 - slot % 2];
        G hs[kTerms], xs[kTerms], gates[kGates] = {}, separate[kSeparate + 1] = {};
        load_terms(hs, &now[0][team.first_term]);
        load_terms(xs, &now[1][team.first_term]);
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
        Cell::template forward<Activation<T, G>>(gates, separate, state, h, saved);
        // Where no column is, zeros stay: its gates may be NaN, from infinities times weights of 0.
        const G own = is_there ? h : G(0);
        if (part < 2) next[part][column] = part == 0 ? own : static_cast<G>(ahead[slot]);
        // Two buffers: who writes the one of the step after next has seen that all have read it.
        Team::wait();
        ahead[slot] = next_input();
        if (stores) *to = static_cast<T>(part == 0 ? h : state);
        to += of_step;
#pragma unroll
        for (int value = Cell::kActivated; value < kSaved; ++value) saved[value] = gates[value];
        if (saves) *to_saved = static_cast<T>(select(saved, part));
        to_saved += kSaved * of_step;
      }
    }
    if (!is_there || part != 0) continue;
    static_cast<T*>(params.last_h)[of_row] = static_cast<T>(h);
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
