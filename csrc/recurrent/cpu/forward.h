// All steps forward on the CPU: what a thread packs, and what it does in a step.
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
struct Forward {
  static constexpr int kGates = Cell::kGates, kSummed = kGates - Cell::kSeparate;

  const ForwardParams& params;
  const int64_t hidden = params.hidden;
  const int64_t lanes = Vec<T>::size();
  const int64_t panels = panels_of<1, T>(hidden);

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * hidden * kGates * lanes;
  }

  void pack(int64_t index) const {
    const T* weight = static_cast<const T*>(params.weight);
    T* to = panel(index);
    const int64_t column = index * lanes;
    const int64_t count = std::min(lanes, hidden - column);
    // Few k at a time, so that the lines that are being written stay in the L1 cache until they are
    // full.
    constexpr int64_t kDepth = 8;
    for (int64_t first = 0; first < hidden; first += kDepth) {
      const int64_t last = std::min(first + kDepth, hidden);
      for (int64_t gate = 0; gate < kGates; ++gate) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const T* row = weight + (gate * hidden + column + lane) * params.weight_stride;
          for (int64_t k = first; k < last; ++k) {
            to[(k * kGates + gate) * lanes + lane] = lane < count ? row[k] : T(0);
          }
        }
      }
    }
  }

  void step(int64_t t, Share rows, Share columns) const {
    const int64_t state = params.batch * hidden;
    const T* output = static_cast<const T*>(params.output);
    const T* h = t == 0 ? static_cast<const T*>(params.h0) : output + (t - 1) * state;
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      for_each_block<kMostRows<kGates>>(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Vec<T> sums[kCount][kGates];
        multiply<T, kCount, kGates>(h + row * hidden, hidden, hidden, panel(index), sums);
        for (int each = 0; each < kCount; ++each) finish(t, row + each, index * lanes, sums[each]);
      });
    }
  }

  void finish(int64_t t, int64_t row, int64_t column, const Vec<T> (&sums)[kGates]) const {
    const int64_t count = std::min(lanes, hidden - column);
    const int64_t at = row * hidden + column;
    const int64_t of_step = t * params.batch + row;
    const T* input = static_cast<const T*>(params.input_gates) + of_step * kGates * hidden + column;
    T* c = static_cast<T*>(params.c) + at;
    T* saved = static_cast<T*>(params.activations);
    Vec<T> gates[kGates];
    for (int gate = 0; gate < kGates; ++gate) {
      gates[gate] = load(input + gate * hidden, count);
      if (gate < kSummed) gates[gate] = gates[gate] + sums[gate];
    }
    Vec<T> separate[Cell::kSeparate > 0 ? Cell::kSeparate : 1];
    for (int gate = kSummed; gate < kGates; ++gate) {
      separate[gate - kSummed] =
          sums[gate] +
          load_or_zero<T>(params.separate_bias, (gate - kSummed) * hidden + column, count);
    }
    Cell::template forward<T>(
        gates, separate,
        {t == 0 ? static_cast<const T*>(params.c0) + at : c + (t - 1) * params.c_stride,
         static_cast<T*>(params.output) + t * params.batch * hidden + at, c + t * params.c_stride,
         saved == nullptr ? nullptr : saved + of_step * Cell::kSaved * hidden + column, hidden,
         count});
  }
};

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
