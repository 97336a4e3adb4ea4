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

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * kGates * hidden * columns_of_panel;
  }

  void pack(int64_t index) const {
    const int64_t column = index * columns_of_panel;
    const int64_t count = std::min(columns_of_panel, hidden - column);
    T* to = panel(index);
    for (int64_t k = 0; k < kGates * hidden; ++k, to += columns_of_panel) {
      const T* row = static_cast<const T*>(params.weight) + k * params.weight_stride + column;
      std::fill(std::copy_n(row, count, to), to + columns_of_panel, T(0));
    }
  }

  // Step -1 is only the product, for the gradient of h0.
  void step(int64_t t, Share rows, Share columns) const {
    constexpr int64_t kRow = kGates;
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      for_each_block<kMostRows<kGradVectors>>(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Vec<T> sums[kCount][kGradVectors];
        if (t + 1 < params.steps) {
          const T* next = static_cast<const T*>(params.grad_gates) +
                          ((t + 1) * params.batch + row) * kRow * hidden;
          multiply<T, kCount, kGradVectors>(next, kRow * hidden, kRow * hidden, panel(index), sums);
        }
        for (int each = 0; each < kCount; ++each) finish(t, row + each, index, sums[each]);
      });
    }
  }

  void finish(int64_t t, int64_t row, int64_t index, const Vec<T> (&sums)[kGradVectors]) const {
    for (int v = 0; v < kGradVectors; ++v) {
      const int64_t column = index * columns_of_panel + v * lanes;
      const int64_t count = std::min(lanes, hidden - column);
      if (count <= 0) return;
      const int64_t at = row * hidden + column;
      T* given = static_cast<T*>(params.grad_h) + at;
      T* grad_state = static_cast<T*>(params.grad_c) + at;
      if (t < 0) {
        store(Cell::kStateIsH ? sums[v] + load(grad_state, count) : sums[v], given, count);
        continue;
      }
      const Vec<T> from_next = t + 1 < params.steps ? sums[v] : load(given, count);
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
