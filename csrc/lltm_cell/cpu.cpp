#include <algorithm>

#include "../recurrent/cells/lltm_pointwise.h"
#include "lltm_cell.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

// A work item is a piece of a row, so that several threads can share one long row.
constexpr int64_t kColumns = 1024;

template <typename Params>
int64_t pieces_per_row(const Params& params) {
  return (params.hidden + kColumns - 1) / kColumns;
}

template <typename Params>
int64_t items(const Params& params) {
  return params.batch * pieces_per_row(params);
}

// A thread gets at least this much work, because waking it costs a few microseconds.
template <typename Params>
int64_t grain(const Params& params) {
  constexpr int64_t kElements = 2048;
  return std::max<int64_t>(1, kElements / std::min(kColumns, std::max<int64_t>(1, params.hidden)));
}

// Calls body(row, column, count) for each vector of the pieces [begin, end).
template <typename T, typename Params, typename Body>
void for_each_vector(const Params& params, int64_t begin, int64_t end, Body body) {
  const int64_t pieces = pieces_per_row(params);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / pieces;
    const int64_t first = (item % pieces) * kColumns;
    const int64_t last = std::min(params.hidden, first + kColumns);
    for (int64_t column = first; column < last; column += kVecSize<T>) {
      body(row, column, std::min(kVecSize<T>, last - column));
    }
  }
}

template <typename T>
void forward(const LltmCellForward& params, int64_t begin, int64_t end) {
  const int64_t hidden = params.hidden;
  for_each_vector<T>(params, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    T* gate = static_cast<T*>(params.gates) + row * 3 * hidden + column;
    const int64_t at = row * hidden + column;
    const LltmCellStep<Compute<T>> step(load(gate, count), load(gate + hidden, count),
                                        load(gate + 2 * hidden, count),
                                        load(static_cast<const T*>(params.c) + at, count));
    store(step.new_c, static_cast<T*>(params.new_c) + at, count);
    store(step.new_h, static_cast<T*>(params.new_h) + at, count);
    if (params.output != nullptr) store(step.new_h, static_cast<T*>(params.output) + at, count);
    if (params.save_activations) {
      store(step.i, gate, count);
      store(step.o, gate + hidden, count);
    }
  });
}

template <typename T>
void backward(const LltmCellBackward& params, int64_t begin, int64_t end) {
  const int64_t hidden = params.hidden;
  for_each_vector<T>(params, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t at = row * hidden + column;
    const int64_t at_gate = row * 3 * hidden + column;
    const T* activation = static_cast<const T*>(params.activations) + at_gate;
    const LltmCellGradient<Compute<T>> grad(
        load(activation, count), load(activation + hidden, count),
        load(activation + 2 * hidden, count), load(static_cast<const T*>(params.new_c) + at, count),
        load_or_zero<T>(params.grad_new_h, at, count),
        load_or_zero<T>(params.grad_new_c, at, count));
    T* grad_gate = static_cast<T*>(params.grad_gates) + at_gate;
    store(grad.i, grad_gate, count);
    store(grad.o, grad_gate + hidden, count);
    store(grad.g, grad_gate + 2 * hidden, count);
    if (params.grad_c != nullptr) store(grad.c, static_cast<T*>(params.grad_c) + at, count);
  });
}

}  // namespace

static void lltm_cell_forward(const LltmCellForward& params, int64_t begin, int64_t end) {
  for_kind(params.kind,
           [&](auto type) { forward<typename decltype(type)::type>(params, begin, end); });
}

static void lltm_cell_backward(const LltmCellBackward& params, int64_t begin, int64_t end) {
  for_kind(params.kind,
           [&](auto type) { backward<typename decltype(type)::type>(params, begin, end); });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_forward, lltm_cell_forward, LltmCellForward, items,
                         grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_backward, lltm_cell_backward, LltmCellBackward,
                         items, grain)
