// The backward pass of LLTM in a grid, with products in half kinds: chooses the compiled kernel for
// a size.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/grid/backward.h"
#include "kernels.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct GridBackward {
  template <typename S, typename T, int... kOf>
  static grid::Status start_of(const grid::BackwardParams& params, cudaStream_t stream) {
    if constexpr (std::is_same_v<S, float> && std::is_same_v<T, __half>) {
      if (params.scales != nullptr)
        return grid::start_backward<LltmOnCuda, S, grid::ScaledProduct<kOf...>>(params, stream);
    }
    return grid::start_backward<LltmOnCuda, S, grid::HalfProduct<T, kOf...>>(params, stream);
  }

  // Launches the smallest kernel with at least this many vectors of a row for each lane.
  template <typename S, typename T>
  static grid::Status start(const grid::BackwardParams& params, int64_t vectors,
                            cudaStream_t stream) {
    if (params.columns == 32) {
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

}  // namespace

// `fits` is described in kernels.h.
extern "C" LaunchStatus tch_extension_lltm_grid_backward_cuda(const grid::BackwardParams* params,
                                                              bool* fits, cudaStream_t stream) {
  const grid::Call<GridBackward, grid::BackwardParams> call{*params, kGates * params->hidden, fits,
                                                            stream};
  return {"lltm_grid_backward", for_kinds(params->kind, params->product_kind, call)};
}

}  // namespace tch_extension::lltm
