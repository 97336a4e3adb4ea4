// The backward pass of LLTM in a wide grid: chooses the compiled kernel for a size.
#include "../recurrent/wide_grid/backward.h"
#include "kernels.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct WideGridBackward {
  // Launches the smallest kernel with at least as many vectors of a row for each warp as this
  // hidden size needs.
  template <typename S, typename T>
  static grid::Status start(const grid::BackwardParams& params, int64_t, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
      if (params.columns != wide_grid::kWideColumns) return {true, kNoKernel};
      if (params.hidden == 512) return wide_grid::start_backward<S, T, 24, true>(params, stream);
      if (params.hidden == 768) return wide_grid::start_backward<S, T, 36, true>(params, stream);
      if (params.hidden == 1024) return wide_grid::start_backward<S, T, 48, true>(params, stream);
      if (params.hidden < 768) return wide_grid::start_backward<S, T, 36, false>(params, stream);
      if (params.hidden < 1024) return wide_grid::start_backward<S, T, 48, false>(params, stream);
    }
    return {true, kNoKernel};
  }
};

}  // namespace

// `fits` is described in kernels.h.
extern "C" LaunchStatus tch_extension_lltm_grid_wide_backward_cuda(
    const grid::BackwardParams* params, bool* fits, cudaStream_t stream) {
  const grid::Call<WideGridBackward, grid::BackwardParams> call{*params, params->hidden, fits,
                                                                stream};
  return {"lltm_grid_wide_backward", for_kinds<Lltm>(params->kind, params->product_kind, call)};
}

}  // namespace tch_extension::lltm
