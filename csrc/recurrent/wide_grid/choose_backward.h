// Chooses the compiled kernel for a size, backward.
#pragma once

#include "backward.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

template <typename Cell>
struct ChooseBackward {
  // Launches the smallest kernel with at least as many vectors of a row for each warp as this
  // hidden size needs. Three gates of 512 columns are 24 vectors.
  template <typename S, typename T>
  static grid::Status start(const BackwardParams& params, int64_t, cudaStream_t stream) {
    static_assert(Cell::kGates == 3, "the weights of four gates do not fit");
    if constexpr (sizeof(T) == 2) {
      if (params.columns != OneTile::kColumns) return {true, kNoKernel};
      if (params.hidden == 512) return start_backward<Cell, S, T, 24, true>(params, stream);
      if (params.hidden == 768) return start_backward<Cell, S, T, 36, true>(params, stream);
      if (params.hidden == 1024) return start_backward<Cell, S, T, 48, true>(params, stream);
      if (params.hidden < 768) return start_backward<Cell, S, T, 36, false>(params, stream);
      if (params.hidden < 1024) return start_backward<Cell, S, T, 48, false>(params, stream);
    }
    return {true, kNoKernel};
  }
};

template <typename Cell>
const char* choose_backward(const BackwardParams& params, bool* fits, cudaStream_t stream) {
  const grid::Call<ChooseBackward<Cell>, BackwardParams> call{params, params.hidden, fits, stream};
  if (params.scales != nullptr) return call.template run<float, __half>();
  return for_kinds<Cell>(params.kind, params.product_kind, call);
}

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
