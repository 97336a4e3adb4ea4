#include "tch_extension/cpu.h"

#include <algorithm>

#include "lltm_cell.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

template <typename T>
using Vec = at::vec::Vectorized<T>;

// An item is a piece of a row, so that one long row is spread over threads, too.
constexpr int64_t kColumns = 1024;

template <typename Params>
int64_t pieces_per_row(const Params& params) {
  return (params.hidden + kColumns - 1) / kColumns;
}

template <typename Params>
int64_t items(const Params& params) {
  return params.batch * pieces_per_row(params);
}

// At least this much work for a thread: waking one costs a few microseconds.
template <typename Params>
int64_t grain(const Params& params) {
  constexpr int64_t kElements = 2048;
  return std::max<int64_t>(1, kElements / std::min(kColumns, std::max<int64_t>(1, params.hidden)));
}

template <typename T>
Vec<T> sigmoid(Vec<T> x) {
  return Vec<T>(T(1)) / (Vec<T>(T(1)) + x.neg().exp());
}

// Calls body(row, column, count) for each vector of the pieces [begin, end).
template <typename T, typename Params, typename Body>
void for_each_vector(const Params& params, int64_t begin, int64_t end, Body body) {
  const int64_t pieces = pieces_per_row(params);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item / pieces;
    const int64_t first = (item % pieces) * kColumns;
    const int64_t last = std::min(params.hidden, first + kColumns);
    for (int64_t column = first; column < last; column += Vec<T>::size()) {
      body(row, column, std::min<int64_t>(Vec<T>::size(), last - column));
    }
  }
}

template <typename T>
void forward(const LltmCellForward& params, int64_t begin, int64_t end) {
  const int64_t hidden = params.hidden;
  for_each_vector<T>(params, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    T* gate = static_cast<T*>(params.gates) + row * 3 * hidden + column;
    const int64_t at = row * hidden + column;
    const Vec<T> i = sigmoid(Vec<T>::loadu(gate, count));
    const Vec<T> o = sigmoid(Vec<T>::loadu(gate + hidden, count));
    const Vec<T> g = Vec<T>::loadu(gate + 2 * hidden, count);
    const Vec<T> candidate = Vec<T>::blendv(g.expm1(), g, g > Vec<T>(T(0)));
    const Vec<T> new_c = Vec<T>::loadu(static_cast<const T*>(params.c) + at, count) + candidate * i;
    const Vec<T> new_h = new_c.tanh() * o;
    new_c.store(static_cast<T*>(params.new_c) + at, count);
    new_h.store(static_cast<T*>(params.new_h) + at, count);
    if (params.save_activations) {
      i.store(gate, count);
      o.store(gate + hidden, count);
    }
  });
}

template <typename T>
Vec<T> load_or_zero(const void* pointer, int64_t at, int64_t count) {
  return pointer == nullptr ? Vec<T>(T(0)) : Vec<T>::loadu(static_cast<const T*>(pointer) + at, count);
}

template <typename T>
void backward(const LltmCellBackward& params, int64_t begin, int64_t end) {
  const int64_t hidden = params.hidden;
  const Vec<T> one(T(1));
  for_each_vector<T>(params, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    const int64_t at = row * hidden + column;
    const int64_t at_gate = row * 3 * hidden + column;
    const T* activation = static_cast<const T*>(params.activations) + at_gate;
    const Vec<T> i = Vec<T>::loadu(activation, count);
    const Vec<T> o = Vec<T>::loadu(activation + hidden, count);
    const Vec<T> g = Vec<T>::loadu(activation + 2 * hidden, count);
    const Vec<T> tanh_c = Vec<T>::loadu(static_cast<const T*>(params.new_c) + at, count).tanh();
    const Vec<T> grad_h = load_or_zero<T>(params.grad_new_h, at, count);
    const Vec<T> positive = g > Vec<T>(T(0));
    const Vec<T> candidate = Vec<T>::blendv(g.expm1(), g, positive);
    const Vec<T> candidate_grad = Vec<T>::blendv(g.exp(), one, positive);

    const Vec<T> grad_c =
        load_or_zero<T>(params.grad_new_c, at, count) + grad_h * o * (one - tanh_c * tanh_c);
    T* grad_gate = static_cast<T*>(params.grad_gates) + at_gate;
    (grad_c * candidate * i * (one - i)).store(grad_gate, count);
    (grad_h * tanh_c * o * (one - o)).store(grad_gate + hidden, count);
    (grad_c * i * candidate_grad).store(grad_gate + 2 * hidden, count);
    if (params.grad_c != nullptr) grad_c.store(static_cast<T*>(params.grad_c) + at, count);
  });
}

}  // namespace

static void lltm_cell_forward(const LltmCellForward& params, int64_t begin, int64_t end) {
  params.kind == kTchExtensionDouble ? forward<double>(params, begin, end)
                                     : forward<float>(params, begin, end);
}

static void lltm_cell_backward(const LltmCellBackward& params, int64_t begin, int64_t end) {
  params.kind == kTchExtensionDouble ? backward<double>(params, begin, end)
                                     : backward<float>(params, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_forward, lltm_cell_forward, LltmCellForward, items, grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_backward, lltm_cell_backward, LltmCellBackward, items, grain)

#if defined(CPU_CAPABILITY_DEFAULT)
#include <cstddef>

// For the test that compares these structs with their Rust mirrors.
extern "C" const size_t tch_extension_lltm_cell_layout[20] = {
    sizeof(LltmCellForward),
    offsetof(LltmCellForward, batch),
    offsetof(LltmCellForward, hidden),
    offsetof(LltmCellForward, kind),
    offsetof(LltmCellForward, save_activations),
    offsetof(LltmCellForward, gates),
    offsetof(LltmCellForward, c),
    offsetof(LltmCellForward, new_h),
    offsetof(LltmCellForward, new_c),
    sizeof(LltmCellBackward),
    offsetof(LltmCellBackward, batch),
    offsetof(LltmCellBackward, hidden),
    offsetof(LltmCellBackward, kind),
    offsetof(LltmCellBackward, reserved),
    offsetof(LltmCellBackward, grad_new_h),
    offsetof(LltmCellBackward, grad_new_c),
    offsetof(LltmCellBackward, activations),
    offsetof(LltmCellBackward, new_c),
    offsetof(LltmCellBackward, grad_gates),
    offsetof(LltmCellBackward, grad_c),
};
#endif
