// One step on the CPU, after its product or, backward, before it. The batch is spread over threads.
#pragma once

#include <algorithm>

#include "../cells/lltm_cpu.h"
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

template <typename T>
void step_forward(const ForwardParams& params, int64_t row, int64_t column, int64_t count) {
  const int64_t hidden = params.hidden;
  const int64_t at = row * hidden + column;
  const int64_t at_gates = row * 3 * hidden + column;
  const auto gate = [&](int64_t index) {
    return load(static_cast<const T*>(params.input_gates) + at_gates + index * hidden, count) +
           load(static_cast<const T*>(params.hidden_gates) + at_gates + index * hidden, count) +
           load_or_zero<T>(params.bias, index * hidden + column, count);
  };
  T* activations = static_cast<T*>(params.activations);
  lltm_forward<T>({gate(0), gate(1), gate(2)},
                  {static_cast<const T*>(params.c) + at, static_cast<T*>(params.new_h) + at,
                   static_cast<T*>(params.new_c) + at,
                   activations == nullptr ? nullptr : activations + at_gates, hidden, count});
}

template <typename T>
void step_backward(const BackwardParams& params, int64_t row, int64_t column, int64_t count) {
  const int64_t hidden = params.hidden;
  const int64_t at = row * hidden + column;
  const int64_t at_gates = row * 3 * hidden + column;
  const Vec<T> grad_h =
      load_or_zero<T>(params.grad_output, at, count) + load_or_zero<T>(params.grad_h, at, count);
  lltm_backward<T>(grad_h,
                   {static_cast<const T*>(params.activations) + at_gates,
                    static_cast<const T*>(params.new_c) + at, static_cast<T*>(params.grad_c) + at,
                    static_cast<T*>(params.grad_gates) + at_gates, hidden, count});
}

template <typename T, typename Params, typename Body>
void for_each_vector(const Params& params, int64_t begin, int64_t end, Body body) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < params.hidden; column += kVecSize<T>) {
      body(params, row, column, std::min(kVecSize<T>, params.hidden - column));
    }
  }
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::step
