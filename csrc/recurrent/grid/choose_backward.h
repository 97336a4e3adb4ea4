// Chooses the compiled kernel for a size, backward with products in half kinds.
#pragma once

#include "backward.h"

namespace tch_extension::recurrent::grid {
namespace {

template <typename Cell>
struct ChooseBackward {
  template <typename S, typename T, int kTiles, int kVectors, int kShared, int kRing, int kGroup>
  static Status start_of(const BackwardParams& params, cudaStream_t stream) {
    constexpr int kGates = Cell::kGates;
    if constexpr (std::is_same_v<S, float> && std::is_same_v<T, __half>) {
      // A pair of tiles has a vector for each gate, and is waited for as a whole.
      constexpr int kScaledRing = kRing % kGates == 0 ? kRing : kVectors,
                    kScaledGroup = kGroup % kGates == 0 ? kGroup : kGates;
      using Product = ScaledProduct<kGates, kTiles, kVectors, kShared, kScaledRing, kScaledGroup>;
      if (params.scales != nullptr) return start_backward<Cell, S, Product>(params, stream);
    }
    if constexpr (std::is_same_v<S, T> || Cell::kHasMixedKinds) {
      using Product = HalfProduct<T, kTiles, kVectors, kShared, kRing, kGroup>;
      return start_backward<Cell, S, Product>(params, stream);
    }
    return {true, kNoKernel};
  }

  // Launches the smallest kernel with at least this many vectors of a row for each lane.
  template <typename S, typename T>
  static Status start(const BackwardParams& params, int64_t vectors, cudaStream_t stream) {
    if constexpr (Cell::kGates == 4) {
      if (params.columns == 32) {
        if (vectors <= 8) return start_of<S, T, 2, 8, 0, 8, 4>(params, stream);
        if (vectors <= 12) return start_of<S, T, 2, 12, 24, 6, 6>(params, stream);
        if (vectors <= 16) return start_of<S, T, 2, 16, 32, 8, 8>(params, stream);
      } else {
        if (vectors <= 12) return start_of<S, T, 1, 12, 0, 12, 6>(params, stream);
        if (vectors <= 16) return start_of<S, T, 1, 16, 0, 8, 8>(params, stream);
        if (vectors <= 24) return start_of<S, T, 1, 24, 20, 12, 6>(params, stream);
        if (vectors <= 32) return start_of<S, T, 1, 32, 36, 8, 8>(params, stream);
      }
    } else if (params.columns == 32) {
      if (vectors <= 6) return start_of<S, T, 2, 6, 0, 6, 3>(params, stream);
      if (vectors <= 9) return start_of<S, T, 2, 9, 9, 9, 3>(params, stream);
      if (vectors <= 12) return start_of<S, T, 2, 12, 24, 6, 6>(params, stream);
    } else {
      if (vectors <= 9) return start_of<S, T, 1, 9, 0, 9, 3>(params, stream);
      if (vectors <= 12) return start_of<S, T, 1, 12, 0, 12, 6>(params, stream);
      if (vectors <= 18) return start_of<S, T, 1, 18, 4, 9, 9>(params, stream);
      if (vectors <= 24) return start_of<S, T, 1, 24, 20, 12, 6>(params, stream);
    }
    return {true, kNoKernel};
  }
};

template <typename Cell>
const char* choose_backward(const BackwardParams& params, bool* fits, cudaStream_t stream) {
  const int64_t terms = Cell::kGates * params.hidden;
  const Call<ChooseBackward<Cell>, BackwardParams> call{params, terms, fits, stream};
  if (params.scales != nullptr) return call.template run<float, __half>();
  return for_kinds<Cell>(params.kind, params.product_kind, call);
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
