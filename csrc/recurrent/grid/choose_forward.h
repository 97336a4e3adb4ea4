// Chooses the compiled kernel for a size, forward with products in half kinds.
#pragma once

#include "forward.h"

namespace tch_extension::recurrent::grid {
namespace {

template <typename Cell>
struct ChooseForward {
  template <typename S, int kColumns, typename T, int kVectors, int kShared, int kGroup>
  static Status start_of(const ForwardParams& params, cudaStream_t stream) {
    return start_forward<Cell, S, kColumns,
                         HalfForwardProduct<Cell, T, kColumns, kVectors, kShared, kGroup>>(params,
                                                                                           stream);
  }

  // Launches the smallest kernel with at least this many vectors of a row for each lane. What four
  // gates have more of is in shared memory.
  template <typename S, typename T>
  static Status start(const ForwardParams& params, int64_t vectors, cudaStream_t stream) {
    constexpr bool kFour = Cell::kGates == 4;
    if (params.columns == 32) {
      if (vectors <= 2) return start_of<S, 32, T, 2, 0, 2>(params, stream);
      if (vectors <= 3) return start_of<S, 32, T, 3, kFour ? 14 : 0, 3>(params, stream);
      if (vectors <= 4) return start_of<S, 32, T, 4, kFour ? 30 : 12, 2>(params, stream);
    } else {
      if (vectors <= 3) return start_of<S, 16, T, 3, 0, 3>(params, stream);
      if (vectors <= 4) return start_of<S, 16, T, 4, 0, 2>(params, stream);
      if (vectors <= 6) return start_of<S, 16, T, 6, kFour ? 14 : 0, 6>(params, stream);
      if (vectors <= 8) return start_of<S, 16, T, 8, kFour ? 30 : 14, 8>(params, stream);
    }
    return {true, kNoKernel};
  }
};

template <typename Cell>
const char* choose_forward(const ForwardParams& params, bool* fits, cudaStream_t stream) {
  const Call<ChooseForward<Cell>, ForwardParams> call{params, params.hidden, fits, stream};
  if (params.scales != nullptr) return call.template run<float, __half>();
  return for_kinds<Cell>(params.kind, params.product_kind, call);
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
