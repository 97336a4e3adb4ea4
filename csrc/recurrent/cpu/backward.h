// All steps backward on the CPU: what a thread packs, and what it does in a step.
#pragma once

#include <algorithm>

#include "../cells/cpu.h"
#include "params.h"
#include "product.h"
#include "team.h"

namespace tch_extension::recurrent::cpu {
inline namespace CPU_CAPABILITY {
namespace {

template <typename Cell, typename T>
struct Backward {
  static constexpr int kGates = Cell::kGates;

  const BackwardParams& params;
  const int64_t hidden = params.hidden;
  const int64_t lanes = Vec<T>::size();
  const int64_t columns_of_panel = kGradVectors * lanes;
  const int64_t panels = panels_of<kGradVectors, T>(hidden);
  // Those of W_ih come after those of W_h.
  const bool has_input = params.grad_input != nullptr;
  const int64_t input_panels = has_input ? panels_of<kGradVectors, T>(params.features) : 0;
  const int64_t packed_panels = panels + input_panels;

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * kGates * hidden * columns_of_panel;
  }

  void pack(int64_t index) const {
    T* to = panel(index);
    if (index < panels) {
      pack(index, params.weight, params.weight_stride, hidden, to);
    } else {
      pack(index - panels, params.input_weight, params.features, params.features, to);
    }
  }

  void pack(int64_t index, const void* weight, int64_t stride, int64_t columns, T* to) const {
    const int64_t column = index * columns_of_panel;
    const int64_t count = std::min(columns_of_panel, columns - column);
    for (int64_t k = 0; k < kGates * hidden; ++k, to += columns_of_panel) {
      const T* row = static_cast<const T*>(weight) + k * stride + column;
      std::fill(std::copy_n(row, count, to), to + columns_of_panel, T(0));
    }
  }

  // A step's gradient for the input. The gradients for the gates are still in the cache.
  void multiply_input(int64_t t, Share rows, Share columns) const {
    constexpr int64_t kSummed = kGates - Cell::kSeparate;
    const int64_t first = t * params.batch;
    const T* gates = static_cast<const T*>(params.grad_gates);
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      const T* weights = panel(panels + index);
      multiply_input(first, rows, index, {gates, kGates}, kSummed * hidden, weights, false);
      if constexpr (Cell::kSeparate > 0) {
        const T* separate = static_cast<const T*>(params.grad_separate);
        multiply_input(first, rows, index, {separate, Cell::kSeparate}, Cell::kSeparate * hidden,
                       weights + kSummed * hidden * columns_of_panel, true);
      }
    }
  }

  // Gradients for gates, as rows of so many times H values.
  struct Gradients {
    const T* values;
    int64_t row;
  };

  // The part of the gradient for the input that some gates have, which is added to what is there
  // or replaces it.
  void multiply_input(int64_t first, Share rows, int64_t index, Gradients gates, int64_t depth,
                      const T* weights, bool is_added) const {
    const int64_t features = params.features, stride = gates.row * hidden;
    for_each_block<kMostRows<kGradVectors>>(rows.begin, rows.end, [&](auto block, int64_t row) {
      T* to = static_cast<T*>(params.grad_input) + (first + row) * features;
      const auto column = [&](int v) { return index * columns_of_panel + v * lanes; };
      const auto count = [&](int v) { return std::min(lanes, features - column(v)); };
      const auto start = [&](int each, int v) {
        if (!is_added || count(v) <= 0) return Vec<T>(T(0));
        return load(to + each * features + column(v), count(v));
      };
      const auto end = [&](int each, int v, const Vec<T>& sum) {
        if (count(v) > 0) store(sum, to + each * features + column(v), count(v));
      };
      multiply<T, decltype(block)::count, kGradVectors>(gates.values + (first + row) * stride,
                                                        stride, depth, weights, start, end);
    });
  }

  // Step -1 is only the products, for the gradients of h0 and of the first input.
  void step(int64_t t, Share rows, Part part) const {
    if (t >= 0 || params.needs_grad_h0) multiply_gates(t, rows, part.of(panels));
    if (has_input && t + 1 < params.steps) multiply_input(t + 1, rows, part.of(input_panels));
  }

  void multiply_gates(int64_t t, Share rows, Share columns) const {
    const int64_t stride = kGates * hidden;
    const bool is_last = t + 1 == params.steps;
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      for_each_block<kMostRows<kGradVectors>>(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Tile<T, kCount, kGradVectors> tile;
        const T* next =
            static_cast<const T*>(params.grad_gates) + ((t + 1) * params.batch + row) * stride;
        const auto zero = [](int, int) { return Vec<T>(T(0)); };
        const auto end = [&](int each, int v, const Vec<T>& sum) {
          sum.store(tile.values[each][v]);
        };
        for (int each = 0; each < kCount; ++each) prefetch(t, row + each, index);
        // After the last step there are no gates, and the sums are not used.
        multiply<T, kCount, kGradVectors>(next, stride, is_last ? 0 : stride, panel(index), zero,
                                          end);
        for (int each = 0; each < kCount; ++each) finish(t, row + each, index, tile.values[each]);
      });
    }
  }

  // Fetches what `finish` will read and write, while the product is computed: these are short
  // pieces of many rows, which the hardware does not foresee.
  void prefetch(int64_t t, int64_t row, int64_t index) const {
    if (t < 0) return;
    const int64_t first = index * columns_of_panel, of_step = t * params.batch + row;
    const int64_t last = std::min(first + columns_of_panel, hidden);
    for (int64_t column = first; column < last; column += lanes) {
      const T* saved = static_cast<const T*>(params.activations) + column;
      for (int each = 0; each < Cell::kSaved; ++each) {
        __builtin_prefetch(saved + (of_step * Cell::kSaved + each) * hidden);
      }
      const T* to = static_cast<const T*>(params.grad_gates) + column;
      for (int gate = 0; gate < kGates; ++gate) {
        __builtin_prefetch(to + (of_step * kGates + gate) * hidden, 1);
      }
      const int64_t state = of_step * hidden + column;
      __builtin_prefetch(static_cast<const T*>(params.c) + state);
      if (params.grad_output == nullptr) continue;
      __builtin_prefetch(static_cast<const T*>(params.grad_output) + state);
    }
  }

  void finish(int64_t t, int64_t row, int64_t index, const T (*sums)[Vec<T>::size()]) const {
    for (int v = 0; v < kGradVectors; ++v) {
      const int64_t column = index * columns_of_panel + v * lanes;
      const int64_t count = std::min(lanes, hidden - column);
      if (count <= 0) return;
      const int64_t at = row * hidden + column;
      T* given = static_cast<T*>(params.grad_h) + at;
      T* grad_state = static_cast<T*>(params.grad_c) + at;
      const Vec<T> sum = Vec<T>::loadu(sums[v]);
      if (t < 0) {
        store(Cell::kStateIsH ? sum + load(grad_state, count) : sum, given, count);
        continue;
      }
      const Vec<T> from_next = t + 1 < params.steps ? sum : load(given, count);
      const int64_t of_step = t * params.batch + row;
      const int64_t state = of_step * hidden + column;
      const T* states = static_cast<const T*>(params.c);
      const T* before = nullptr;
      if constexpr (Cell::kNeedsPreviousState) {
        before =
            t == 0 ? static_cast<const T*>(params.c0) + at : states + state - params.batch * hidden;
      }
      T* separate = nullptr;
      if constexpr (Cell::kSeparate > 0) {
        separate =
            static_cast<T*>(params.grad_separate) + of_step * Cell::kSeparate * hidden + column;
      }
      Cell::template backward<T>(
          load_or_zero<T>(params.grad_output, state, count) + from_next,
          {static_cast<const T*>(params.activations) + of_step * Cell::kSaved * hidden + column,
           before, states + state, grad_state,
           static_cast<T*>(params.grad_gates) + of_step * kGates * hidden + column, separate,
           hidden, count});
    }
  }
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
