// Scalar functions for kernels, on the host and on the device, in the precision of their argument: no
// fmaxf on a double, no double constant that widens a float.
#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define TCH_EXTENSION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TCH_EXTENSION_HOST_DEVICE inline
#endif

namespace tch_extension {

template <typename T>
TCH_EXTENSION_HOST_DEVICE T sigmoid(T x) {
  using std::exp;
  return T(1) / (T(1) + exp(-x));
}

// d sigmoid / dx from y = sigmoid(x).
template <typename T>
TCH_EXTENSION_HOST_DEVICE T sigmoid_grad(T y) {
  return y * (T(1) - y);
}

// d tanh / dx from y = tanh(x).
template <typename T>
TCH_EXTENSION_HOST_DEVICE T tanh_grad(T y) {
  return T(1) - y * y;
}

// The exponential linear unit with alpha = 1. expm1, because exp(x) - 1 loses all digits near 0.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T elu(T x) {
  using std::expm1;
  return x > T(0) ? x : expm1(x);
}

// d elu / dx from x itself: elu(x) + 1 has no digits left where elu(x) is near -1.
template <typename T>
TCH_EXTENSION_HOST_DEVICE T elu_grad(T x) {
  using std::exp;
  return x > T(0) ? T(1) : exp(x);
}

}  // namespace tch_extension
