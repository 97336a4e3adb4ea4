// Level 4: products of strided matrices, so that a transposed matrix needs no copy.
// src/linear/kernels.rs declares the parameters. The CPU and CUDA kernels share the initial value
// of each element.
#pragma once

#include "src/linear/kernels.rs.h"
#include "tch_extension/accessor.h"
#include "tch_extension/kind.h"

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
