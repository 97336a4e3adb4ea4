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
  // Those of W_ih come after those of W_h.
  const bool has_input = params.input != nullptr;
  const int64_t packed_panels = has_input ? 2 * panels : panels;

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * hidden * kGates * lanes;
  }

  T* input_panel(int64_t index) const {
    return panel(panels) + index * params.features * kGates * lanes;
  }

  void pack(int64_t index) const {
    if (index < panels) {
      pack(index, params.weight, params.weight_stride, hidden, panel(index));
    } else {
      index -= panels;
      pack(index, params.input_weight, params.features, params.features, input_panel(index));
    }
  }

  void pack(int64_t index, const void* from, int64_t stride, int64_t depth, T* to) const {
    const T* weight = static_cast<const T*>(from);
    const int64_t column = index * lanes;
    const int64_t count = std::min(lanes, hidden - column);
    // Few k at a time, so that the lines that are being written stay in the L1 cache until they are
    // full.
    constexpr int64_t kDepth = 8;
    for (int64_t first = 0; first < depth; first += kDepth) {
      const int64_t last = std::min(first + kDepth, depth);
      for (int64_t gate = 0; gate < kGates; ++gate) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const T* row = weight + (gate * hidden + column + lane) * stride;
          for (int64_t k = first; k < last; ++k) {
            to[(k * kGates + gate) * lanes + lane] = lane < count ? row[k] : T(0);
          }
        }
      }
    }
  }

  T* gates_of(int64_t t, int64_t row) const {
    return static_cast<T*>(params.input_gates) + t * params.gates_stride + row * kGates * hidden;
  }

  // The input's part of a step's gates. It is read again while it is still in the cache.
  void multiply_input(int64_t t, Share rows, Share columns) const {
    const int64_t features = params.features;
    const T* input = static_cast<const T*>(params.input) + t * params.batch * features;
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      const int64_t column = index * lanes, count = std::min(lanes, hidden - column);
      for_each_block<kMostRows<kGates>>(rows.begin, rows.end, [&](auto block, int64_t row) {
        T* to = gates_of(t, row) + column;
        const auto bias = [&](int, int gate) {
          return load_or_zero<T>(params.input_bias, gate * hidden + column, count);
        };
        const auto end = [&](int each, int gate, const Vec<T>& sum) {
          store(sum, to + (each * kGates + gate) * hidden, count);
        };
        multiply<T, decltype(block)::count, kGates>(input + row * features, features, features,
                                                    input_panel(index), bias, end);
      });
    }
  }

  void step(int64_t t, Share rows, Part part) const {
    const Share columns = part.of(panels);
    if (has_input) multiply_input(t, rows, columns);
    const int64_t state = params.batch * hidden;
    const T* output = static_cast<const T*>(params.output);
    const T* h = t == 0 ? static_cast<const T*>(params.h0) : output + (t - 1) * state;
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      const int64_t column = index * lanes, count = std::min(lanes, hidden - column);
      for_each_block<kMostRows<kGates>>(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Tile<T, kCount, kGates> tile;
        const T* input = gates_of(t, row) + column;
        const auto start = [&](int each, int gate) {
          return gate < kSummed ? load(input + (each * kGates + gate) * hidden, count)
                                : load_or_zero<T>(params.separate_bias,
                                                  (gate - kSummed) * hidden + column, count);
        };
        const auto end = [&](int each, int gate, const Vec<T>& sum) {
          sum.store(tile.values[each][gate]);
        };
        multiply<T, kCount, kGates>(h + row * hidden, hidden, hidden, panel(index), start, end);
        for (int each = 0; each < kCount; ++each) finish(t, row + each, column, tile.values[each]);
      });
    }
  }

  void finish(int64_t t, int64_t row, int64_t column, const T (*sums)[Vec<T>::size()]) const {
    const int64_t count = std::min(lanes, hidden - column);
    const int64_t at = row * hidden + column;
    const int64_t of_step = t * params.batch + row;
    T* c = static_cast<T*>(params.c) + at;
    T* saved = static_cast<T*>(params.activations);
    Vec<T> gates[kGates], separate[Cell::kSeparate > 0 ? Cell::kSeparate : 1];
    for (int gate = 0; gate < kSummed; ++gate) gates[gate] = Vec<T>::loadu(sums[gate]);
    for (int gate = kSummed; gate < kGates; ++gate) {
      gates[gate] = load(gates_of(t, row) + gate * hidden + column, count);
      separate[gate - kSummed] = Vec<T>::loadu(sums[gate]);
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
