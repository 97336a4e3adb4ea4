// Scalar functions for kernels, on the host and on the device. Each is computed in the precision of
// its argument (no fmaxf on a double, no double constant that widens a float) and as libtorch
// defines it.
//
//   y = gelu(x);  // a float gives a float, a double a double; half kinds: Compute<T> of launch.h,
//   cpu.h grad_x = grad_y * gelu_grad(x);
//
// A gradient takes y where y is enough (sigmoid, tanh, relu), and x otherwise. With y, the operator
// saves its output only.
//
// Needs: nothing.
#pragma once

#include <cmath>

#include "tch_extension/host_device.h"

namespace tch_extension {

// How many pieces of size b cover a, for integers a >= 0 and b > 0. The result has the wider type
// of the two.
template <typename A, typename B>
TCH_EXTENSION_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

// The least multiple of b that is at least a.
template <typename A, typename B>
TCH_EXTENSION_HOST_DEVICE constexpr auto round_up(A a, B b) {
  return (a + b - 1) / b * b;
}

template <typename T>
TCH_EXTENSION_HOST_DEVICE T sigmoid(T x) {
  using std::exp;
  return T(1) / (T(1) + exp(-x));
}

// d sigmoid / dx, computed from y = sigmoid(x).
template <typename T>
TCH_EXTENSION_HOST_DEVICE T sigmoid_grad(T y) {
  return y * (T(1) - y);
}

// d tanh / dx, computed from y = tanh(x).
template <typename T>
TCH_EXTENSION_HOST_DEVICE T tanh_grad(T y) {
  return T(1) - y * y;
}

// The exponential linear unit with alpha = 1. It uses expm1, because exp(x) - 1 loses all digits
// near 0.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T elu(T x) {
  using std::expm1;
  return x > T(0) ? x : expm1(x);
}

// d elu / dx, computed from x itself, because elu(x) + 1 loses all digits where elu(x) is near -1.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T elu_grad(T x) {
  using std::exp;
  return x > T(0) ? T(1) : exp(x);
}

// NaN stays NaN, as in libtorch; max(x, 0) would make it 0.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T relu(T x) {
  return x <= T(0) ? T(0) : x;
}

// d relu / dx, computed from x or from y = relu(x). It is 0 at 0.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T relu_grad(T x) {
  return x <= T(0) ? T(0) : T(1);
}

// x · sigmoid(x), also called swish.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T silu(T x) {
  using std::exp;
  return x / (T(1) + exp(-x));
}

// d silu / dx, computed from x.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T silu_grad(T x) {
  const T s = sigmoid(x);
  return s * (T(1) + x * (T(1) - s));
}

// log(1 + exp(beta x)) / beta, and x itself where beta x is greater than `threshold`. The default
// arguments are libtorch's.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T softplus(T x, T beta = T(1), T threshold = T(20)) {
  using std::exp;
  using std::log1p;
  return x * beta > threshold ? x : log1p(exp(x * beta)) / beta;
}

// d softplus / dx, computed from x.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T softplus_grad(T x, T beta = T(1), T threshold = T(20)) {
  return x * beta > threshold ? T(1) : sigmoid(x * beta);
}

// x · Φ(x), computed with the error function: libtorch's gelu with approximate = "none".
template <typename T>
TCH_EXTENSION_HOST_DEVICE T gelu(T x) {
  using std::erf;
  constexpr T kSqrtHalf = T(0.70710678118654752440);
  return T(0.5) * x * (T(1) + erf(x * kSqrtHalf));
}

// d gelu / dx, computed from x.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T gelu_grad(T x) {
  using std::erf;
  using std::exp;
  constexpr T kSqrtHalf = T(0.70710678118654752440);
  constexpr T kDensityAt0 = T(0.39894228040143267794);
  return T(0.5) * (T(1) + erf(x * kSqrtHalf)) + x * kDensityAt0 * exp(T(-0.5) * x * x);
}

// libtorch's gelu with approximate = "tanh".
template <typename T>
TCH_EXTENSION_HOST_DEVICE T gelu_tanh(T x) {
  using std::tanh;
  constexpr T kSqrt2OverPi = T(0.79788456080286535588);
  return T(0.5) * x * (T(1) + tanh(kSqrt2OverPi * (x + T(0.044715) * x * x * x)));
}

// d gelu_tanh / dx, computed from x.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T gelu_tanh_grad(T x) {
  using std::tanh;
  constexpr T kSqrt2OverPi = T(0.79788456080286535588);
  const T t = tanh(kSqrt2OverPi * (x + T(0.044715) * x * x * x));
  const T inner_grad = kSqrt2OverPi * (T(1) + T(3) * T(0.044715) * x * x);
  return T(0.5) * (T(1) + t) + T(0.5) * x * tanh_grad(t) * inner_grad;
}

}  // namespace tch_extension
