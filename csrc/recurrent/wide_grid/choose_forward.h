// Chooses the compiled kernel for a size, forward.
#pragma once

#include "forward.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

template <typename Cell, typename Shape>
struct ChooseForward {
  template <typename S, typename T, int kVectors, bool kWhole>
  static grid::Status start_of(const ForwardParams& params, cudaStream_t stream) {
    return start_forward<Cell, Shape, S, T, kVectors, kWhole>(params, stream);
  }

  // Launches the smallest kernel with at least as many vectors of a row for each warp as this
  // hidden size needs.
  template <typename S, typename T>
  static grid::Status start(const ForwardParams& params, int64_t, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
      constexpr int kOfVector = 2 * kSpan<T>;
      if (params.columns != Shape::kColumns) return {true, kNoKernel};
      if (params.hidden == 8 * kOfVector) return start_of<S, T, 8, true>(params, stream);
      if (params.hidden == 12 * kOfVector) return start_of<S, T, 12, true>(params, stream);
      if (params.hidden == 16 * kOfVector) return start_of<S, T, 16, true>(params, stream);
      if (params.hidden < 12 * kOfVector) return start_of<S, T, 12, false>(params, stream);
      if (params.hidden < 16 * kOfVector) return start_of<S, T, 16, false>(params, stream);
    }
    return {true, kNoKernel};
  }
};

template <typename Cell, typename Shape>
const char* choose_forward(const ForwardParams& params, bool* fits, cudaStream_t stream) {
  using Choose = ChooseForward<Cell, Shape>;
  const grid::Call<Choose, ForwardParams> call{params, params.hidden, fits, stream};
  if (params.scales != nullptr) return call.template run<float, __half>();
  return for_kinds<Cell>(params.kind, params.product_kind, call);
}

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
