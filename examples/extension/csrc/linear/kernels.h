// Level 4: products of strided matrices, so that a transposed matrix needs no copy.
// src/linear/kernels.rs mirrors the structs. The CPU and CUDA kernels share the initial value of
// each element.
#pragma once

#include "tch_extension/accessor.h"
#include "tch_extension/kind.h"

// y = x Wᵀ + b
struct LinearForward {
  tch_extension::Strided<2> x;     // [M, K]
  tch_extension::Strided<2> wt;    // [K, N]
  tch_extension::Strided<1> b;     // [N]
  tch_extension::StridedMut<2> y;  // [M, N]
};

// c = a b
struct LinearProduct {
  tch_extension::Strided<2> a;     // [M, K]
  tch_extension::Strided<2> b;     // [K, N]
  tch_extension::StridedMut<2> c;  // [M, N]
};

namespace extension {

struct StartWithZero {
  template <typename T>
  TCH_EXTENSION_HOST_DEVICE T at(int64_t) const {
    return T(0);
  }
};

template <typename T>
struct StartWithBias {
  tch_extension::Accessor<const T, 1> bias;
  template <typename>
  TCH_EXTENSION_HOST_DEVICE T at(int64_t column) const {
    return bias(column);
  }
};

}  // namespace extension
