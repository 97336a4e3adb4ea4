// Chooses the compiled kernel for a size, backward.
#pragma once

#include "backward.h"

namespace tch_extension::recurrent::cluster {
namespace {

template <typename Cell>
struct ChooseBackward {
  template <int kPadded, int kCluster, typename T, int kShared = 0>
  using Half = HalfBackwardProduct<Cell, T, kPadded, kCluster, kShared>;

  template <typename S, typename T>
  const char* run() const {
    const int padded = padded_size(params.hidden, params.cluster);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      return padded == 128 ? start<S, PlainBackwardProduct<Cell, T, 128, 8>>() : kNoKernel;
    } else {
      switch (padded) {
        case 128:
          return start<S, Half<128, 8, T>>();
        case 256:
          return params.cluster == 8 ? start<S, Half<256, 8, T>>() : kNoKernel;
        case 512:
          if (params.cluster == 8) return start<S, Half<512, 8, T, Cell::kGates == 4 ? 8 : 2>>();
          return start<S, Half<512, 16, T>>();
        case 768:
          if constexpr (Cell::kGates == 3) return start<S, Half<768, 16, T, 2>>();
          return kNoKernel;
        default:
          return kNoKernel;
      }
    }
  }

  template <typename S, typename Product>
  const char* start() const {
    return start_clusters<backward_kernel<Cell, S, Product>, Product>(
        params, BackwardLayout<Product>::kBytes, stream);
  }

  const BackwardParams& params;
  cudaStream_t stream;
};

}  // namespace
}  // namespace tch_extension::recurrent::cluster
