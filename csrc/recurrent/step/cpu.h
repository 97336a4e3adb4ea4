// One step on the CPU, after its product in the forward pass or before it in the backward pass.
// Threads share the batch.
#pragma once

#include <algorithm>

#include "../cells/cpu.h"
#include "../cpu/kinds.h"
#include "params.h"

namespace tch_extension::recurrent::step {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Params>
int64_t rows(const Params& params) {
  return params.batch;
}

template <typename Params>
int64_t rows_of_a_thread(const Params& params) {
  constexpr int64_t kElements = 2048;
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, params.hidden));
}

template <typename Cell, typename T>
void forward_vector(const ForwardParams& params, int64_t row, int64_t column, int64_t count) {
  constexpr int kSummed = Cell::kGates - Cell::kSeparate;
  const int64_t hidden = params.hidden;
  const int64_t at = row * hidden + column;
  const int64_t at_gates = row * Cell::kGates * hidden + column;
  Vec<T> gates[Cell::kGates], separate[Cell::kSeparate > 0 ? Cell::kSeparate : 1];
  for (int gate = 0; gate < Cell::kGates; ++gate) {
    const int64_t of_gate = at_gates + gate * hidden;
    gates[gate] = load(static_cast<const T*>(params.input_gates) + of_gate, count) +
                  load_or_zero<T>(params.bias, gate * hidden + column, count);
    const Vec<T> of_h = load(static_cast<const T*>(params.hidden_gates) + of_gate, count);
    if (gate < kSummed) {
      gates[gate] = gates[gate] + of_h;
    } else {
      const int64_t of = gate - kSummed;
      separate[of] = of_h + load_or_zero<T>(params.separate_bias, of * hidden + column, count);
    }
  }
  T* saved = static_cast<T*>(params.activations);
  Cell::template forward<T>(
      gates, separate,
      {static_cast<const T*>(params.c) + at, static_cast<T*>(params.new_h) + at,
       Cell::kStateIsH ? nullptr : static_cast<T*>(params.new_c) + at,
       saved == nullptr ? nullptr : saved + row * Cell::kSaved * hidden + column, hidden, count});
  if (params.operand == nullptr) return;
  store(load(static_cast<const T*>(params.new_h) + at, count), static_cast<T*>(params.operand) + at,
        count);
}

template <typename Cell, typename T>
void backward_vector(const BackwardParams& params, int64_t row, int64_t column, int64_t count) {
  const int64_t hidden = params.hidden;
  const int64_t at = row * hidden + column;
  const Vec<T> grad_h =
      load_or_zero<T>(params.grad_output, at, count) + load_or_zero<T>(params.grad_h, at, count);
  const T* before = nullptr;
  const T* after = nullptr;
  T* separate = nullptr;
  if constexpr (Cell::kNeedsPreviousState) before = static_cast<const T*>(params.previous_c) + at;
  if constexpr (!Cell::kStateIsH) after = static_cast<const T*>(params.new_c) + at;
  if constexpr (Cell::kSeparate > 0) {
    separate = static_cast<T*>(params.grad_separate) + row * Cell::kSeparate * hidden + column;
  }
  Cell::template backward<T>(
      grad_h, {static_cast<const T*>(params.activations) + row * Cell::kSaved * hidden + column,
               before, after, static_cast<T*>(params.grad_c) + at,
               static_cast<T*>(params.grad_gates) + row * Cell::kGates * hidden + column, separate,
               hidden, count});
}

template <typename T, typename Params, typename Body>
void for_each_vector(const Params& params, int64_t begin, int64_t end, Body body) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < params.hidden; column += kVecSize<T>) {
      body(params, row, column, std::min(kVecSize<T>, params.hidden - column));
    }
  }
}

template <typename Cell>
void run_forward(const ForwardParams& params, int64_t begin, int64_t end) {
  for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_vector<T>(params, begin, end, forward_vector<Cell, T>);
  });
}

template <typename Cell>
void run_backward(const BackwardParams& params, int64_t begin, int64_t end) {
  for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_vector<T>(params, begin, end, backward_vector<Cell, T>);
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::step
