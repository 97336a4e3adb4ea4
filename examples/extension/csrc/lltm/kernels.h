// Level 4: everything in a step that follows the product for the gates, and its backward.
// src/lltm/kernels.rs declares the parameters. All matrices have B rows, and H columns or 3H in the
// order i, o, g.
#pragma once

#include "src/lltm/kernels.rs.h"
#include "tch_extension/accessor.h"
#include "tch_extension/kind.h"
#include "tch_extension/scalar_math.h"

namespace extension {

template <typename T>
struct ForwardElement {
  tch_extension::Accessor<T, 2> gates;
  tch_extension::Accessor<const T, 2> c;
  tch_extension::Accessor<T, 2> new_h, new_c;

  explicit ForwardElement(const LltmForward& params)
      : gates(params.gates.of<T>()),
        c(params.c.of<T>()),
        new_h(params.new_h.of<T>()),
        new_c(params.new_c.of<T>()) {}

  int64_t count() const { return c.numel(); }

  TCH_EXTENSION_HOST_DEVICE void operator()(int64_t index) const {
    using std::tanh;
    const int64_t hidden = c.sizes[1], row = index / hidden, column = index % hidden;
    const T i = tch_extension::sigmoid(gates(row, column));
    const T o = tch_extension::sigmoid(gates(row, column + hidden));
    const T cell = c(row, column) + tch_extension::elu(gates(row, column + 2 * hidden)) * i;
    new_c(row, column) = cell;
    new_h(row, column) = tanh(cell) * o;
    gates(row, column) = i;
    gates(row, column + hidden) = o;
  }
};

template <typename T>
struct BackwardElement {
  tch_extension::Accessor<const T, 2> activations, new_c, grad_new_h, grad_new_c;
  tch_extension::Accessor<T, 2> grad_gates, grad_c;

  explicit BackwardElement(const LltmBackward& params)
      : activations(params.activations.of<T>()),
        new_c(params.new_c.of<T>()),
        grad_new_h(params.grad_new_h.of<T>()),
        grad_new_c(params.grad_new_c.of<T>()),
        grad_gates(params.grad_gates.of<T>()),
        grad_c(params.grad_c.of<T>()) {}

  int64_t count() const { return new_c.numel(); }

  TCH_EXTENSION_HOST_DEVICE void operator()(int64_t index) const {
    using std::tanh;
    const int64_t hidden = new_c.sizes[1], row = index / hidden, column = index % hidden;
    const T i = activations(row, column), o = activations(row, column + hidden);
    const T g = activations(row, column + 2 * hidden);
    const T tanh_c = tanh(new_c(row, column)), grad_h = grad_new_h(row, column);
    const T grad_cell = grad_new_c(row, column) + grad_h * o * tch_extension::tanh_grad(tanh_c);
    grad_c(row, column) = grad_cell;
    grad_gates(row, column) = grad_cell * tch_extension::elu(g) * tch_extension::sigmoid_grad(i);
    grad_gates(row, column + hidden) = grad_h * tanh_c * tch_extension::sigmoid_grad(o);
    grad_gates(row, column + 2 * hidden) = grad_cell * i * tch_extension::elu_grad(g);
  }
};

}  // namespace extension
