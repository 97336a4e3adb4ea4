// The statistics by which rows are normalised: policies of the engine in this folder. M rows of N
// columns, row-major and contiguous; g = dy w.
//
//   LayerNorm   mean = Σ x / N      rstd = 1 / √(Σ (x - mean)² / N + eps)
//               x̂ = (x - mean) rstd
//               dx = rstd (g - Σ g / N - x̂ Σ g x̂ / N)
//   RmsNorm     rstd = 1 / √(Σ x² / N + eps)
//               x̂ = x rstd
//               dx = rstd (g - x̂ Σ g x̂ / N)
//   both        y = x̂ w + b      dw = Σ dy x̂      db = Σ dy      over the rows
//
// Half-precision values are computed in float and rounded when stored. The kind in which values are
// computed is the compute kind: float for half precision, otherwise the kind itself.
#pragma once

#include "tch_extension/host_device.h"

namespace tch_extension::norm {

struct LayerNorm {
  // Whether the row's mean is subtracted. Where it is not, the kernels' `mean` is not read.
  static constexpr bool kCentred = true;
};

struct RmsNorm {
  static constexpr bool kCentred = false;
};

// x̂, of a value of C or a vector of such values.
template <typename Norm, typename V>
TCH_EXTENSION_HOST_DEVICE V normal_of(V x, V mean, V rstd) {
  if constexpr (Norm::kCentred) return (x - mean) * rstd;
  return x * rstd;
}

// dx, from g, x̂, Σ g / N and Σ g x̂ / N.
template <typename Norm, typename V>
TCH_EXTENSION_HOST_DEVICE V input_gradient(V rstd, V grad, V mean_grad, V normal, V mean_product) {
  if constexpr (Norm::kCentred) return rstd * (grad - mean_grad - normal * mean_product);
  return rstd * (grad - normal * mean_product);
}

}  // namespace tch_extension::norm
