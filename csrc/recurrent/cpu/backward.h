// All steps backward on the CPU: what a thread packs, and what it does in a step.
#pragma once

#include <algorithm>

#include "../cells/lltm.h"
#include "../cells/lltm_cpu.h"
#include "params.h"
#include "product.h"
#include "team.h"

namespace tch_extension::recurrent::cpu {
inline namespace CPU_CAPABILITY {
namespace {

template <typename T>
struct Backward {
  const BackwardParams& params;
  const int64_t hidden = params.hidden;
  const int64_t lanes = Vec<T>::size();
  const int64_t columns_of_panel = kGradVectors * lanes;
  const int64_t panels = panels_of<kGradVectors, T>(hidden);

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * 3 * hidden * columns_of_panel;
  }

  void pack(int64_t index) const {
    const int64_t column = index * columns_of_panel;
    const int64_t count = std::min(columns_of_panel, hidden - column);
    T* to = panel(index);
    for (int64_t k = 0; k < 3 * hidden; ++k, to += columns_of_panel) {
      const T* row = static_cast<const T*>(params.weight) + k * params.weight_stride + column;
      std::fill(std::copy_n(row, count, to), to + columns_of_panel, T(0));
    }
  }

  // Step -1 is only the product, for h0.
  void step(int64_t t, Share rows, Share columns) const {
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      for_each_block(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Vec<T> sums[kCount][kGradVectors];
        if (t + 1 < params.steps) {
          const T* behind = static_cast<const T*>(params.grad_gates) +
                            ((t + 1) * params.batch + row) * 3 * hidden;
          multiply<T, kCount, kGradVectors>(behind, 3 * hidden, 3 * hidden, panel(index), sums);
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
      if (t < 0) {
        store(sums[v], given, count);
        continue;
      }
      const Vec<T> from_behind = t + 1 < params.steps ? sums[v] : load(given, count);
      const int64_t state = (t * params.batch + row) * hidden + column;
      const int64_t gates = (t * params.batch + row) * 3 * hidden + column;
      lltm_backward<T>(
          load_or_zero<T>(params.grad_output, state, count) + from_behind,
          {static_cast<const T*>(params.activations) + gates,
           static_cast<const T*>(params.c) + state, static_cast<T*>(params.grad_c) + at,
           static_cast<T*>(params.grad_gates) + gates, hidden, count});
    }
  }
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
