// Names that the other extension also has, with another meaning.
#pragma once

#include <ATen/core/Tensor.h>

#include <stdexcept>

struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <typename scalar_t>
inline scalar_t scaled(scalar_t x) {
  return x * 2;
}

// The number of calls of this extension's functions.
inline int& calls() {
  static int count = 0;
  return count;
}

at::Tensor scale(const at::Tensor& x);
#ifdef WITH_CUDA
at::Tensor scale_cuda(const at::Tensor& x);
#endif
