// The gradients of weight and bias on the CPU, from their partial sums.
#pragma once

#include "cpu.h"

namespace tch_extension::norm {
inline namespace CPU_CAPABILITY {
namespace {

// The number of columns that one item of the finishing kernel sums up.
constexpr int64_t kColumns = 256;

int64_t finish_items(const NormBackward& params) {
  return (params.columns + kColumns - 1) / kColumns;
}

int64_t finish_grain(const NormBackward& params) { return grain_of(params.parts * kColumns); }

template <typename W, typename C>
void sum_parts(const void* parts, void* result, int64_t count_of_parts, int64_t columns,
               int64_t first, int64_t last) {
  if (result == nullptr) return;
  for (int64_t column = first; column < last; column += Vec<C>::size()) {
    const int64_t count = std::min<int64_t>(Vec<C>::size(), last - column);
    Vec<C> sum(0);
    for (int64_t part = 0; part < count_of_parts; ++part) {
      sum = sum + load(static_cast<const C*>(parts) + part * columns + column, count);
    }
    store(sum, static_cast<W*>(result) + column, count);
  }
}

// Adds up the parts of the gradients of weight and bias.
void run_finish(const NormBackward& params, int64_t begin, int64_t end) {
  const int64_t first = begin * kColumns, last = std::min(params.columns, end * kColumns);
  for_kinds(params, [&](auto type, auto parameter) {
    using C = Compute<typename decltype(type)::type>;
    using W = typename decltype(parameter)::type;
    sum_parts<W, C>(params.weight_parts, params.grad_weight, params.parts, params.columns, first,
                    last);
    sum_parts<W, C>(params.bias_parts, params.grad_bias, params.parts, params.columns, first, last);
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::norm
