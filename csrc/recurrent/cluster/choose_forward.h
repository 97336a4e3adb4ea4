// Chooses the compiled kernel for a size, forward.
#pragma once

#include "forward.h"

namespace tch_extension::recurrent::cluster {
namespace {

template <typename Cell>
struct ChooseForward {
  template <int kPadded, int kCluster, typename T, int kShared = 0>
  using Half = HalfForwardProduct<Cell, T, kPadded, kCluster, kShared>;

  template <typename S, typename T>
  const char* run() const {
    const int padded = padded_size(params.hidden, params.cluster);
    if constexpr (sizeof(T) > 2) {
      if (padded == 128 && params.cluster == 8)
        return start<S, PlainForwardProduct<Cell, T, 128, 8, 4>>();
      return params.cluster == 16 && padded == 256
                 ? start<S, PlainForwardProduct<Cell, T, 256, 16, 8>>()
                 : kNoKernel;
    } else {
      switch (padded) {
        case 128:
          return start<S, Half<128, 8, T>>();
        case 256:
          return params.cluster == 8 ? start<S, Half<256, 8, T>>() : kNoKernel;
        case 512:
          // The registers of 8 blocks have no room for the weights of four gates.
          if (params.cluster == 8) return start<S, Half<512, 8, T, Cell::kGates == 4 ? 4 : 0>>();
          return start<S, Half<512, 16, T>>();
        case 768:
          if constexpr (Cell::kGates == 3) return start<S, Half<768, 16, T>>();
          return kNoKernel;
        default:
          return kNoKernel;
      }
    }
  }

  template <typename S, typename Product>
  const char* start() const {
    return start_clusters<forward_kernel<Cell, S, Product>, Product>(
        params, ForwardLayout<Product>::kBytes, stream);
  }

  const ForwardParams& params;
  cudaStream_t stream;
};

}  // namespace
}  // namespace tch_extension::recurrent::cluster
