// Uses the public headers: every scalar function, elementwise, with any strides.
#pragma once

#include "tch_extension/accessor.h"
#include "tch_extension/kind.h"
#include "tch_extension/scalar_math.h"

struct MathsParams {
  tch_extension::Strided<2> x;
  tch_extension::StridedMut<2> y;
  int32_t function;  // an index into FUNCTIONS of src/maths.rs
};

namespace tch_extension {

template <typename T>
TCH_EXTENSION_HOST_DEVICE T evaluate(int32_t function, T x) {
  using std::tanh;
  switch (function) {
    case 0:
      return relu(x);
    case 1:
      return relu_grad(x);
    case 2:
      return silu(x);
    case 3:
      return silu_grad(x);
    case 4:
      return softplus(x);
    case 5:
      return softplus_grad(x);
    case 6:
      return gelu(x);
    case 7:
      return gelu_grad(x);
    case 8:
      return gelu_tanh(x);
    case 9:
      return gelu_tanh_grad(x);
    case 10:
      return sigmoid(x);
    case 11:
      return sigmoid_grad(sigmoid(x));
    case 12:
      return elu(x);
    case 13:
      return elu_grad(x);
    case 14:
      return tanh(x);
    default:
      return tanh_grad(tanh(x));
  }
}

}  // namespace tch_extension
