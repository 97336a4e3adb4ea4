// The forward pass of LLTM in a wide grid: chooses the compiled kernel for a size.
#include "../recurrent/wide_grid/forward.h"
#include "kernels.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct WideGridForward {
  // Launches the smallest kernel with at least as many vectors of a row for each warp as this
  // hidden size needs.
  template <typename S, typename T>
  static grid::Status start(const grid::ForwardParams& params, int64_t, cudaStream_t stream) {
    if constexpr (sizeof(T) == 2) {
      constexpr int kOfVector = 2 * kSpan<T>;
      if (params.columns != wide_grid::kWideColumns) return {true, kNoKernel};
      if (params.hidden == 8 * kOfVector)
        return wide_grid::start_forward<S, T, 8, true>(params, stream);
      if (params.hidden == 12 * kOfVector)
        return wide_grid::start_forward<S, T, 12, true>(params, stream);
      if (params.hidden == 16 * kOfVector)
        return wide_grid::start_forward<S, T, 16, true>(params, stream);
      if (params.hidden < 12 * kOfVector)
        return wide_grid::start_forward<S, T, 12, false>(params, stream);
      if (params.hidden < 16 * kOfVector)
        return wide_grid::start_forward<S, T, 16, false>(params, stream);
    }
    return {true, kNoKernel};
  }
};

}  // namespace

// `fits` is described in kernels.h.
extern "C" LaunchStatus tch_extension_lltm_grid_wide_forward_cuda(const grid::ForwardParams* params,
                                                                  bool* fits, cudaStream_t stream) {
  const grid::Call<WideGridForward, grid::ForwardParams> call{*params, params->hidden, fits,
                                                              stream};
  return {"lltm_grid_wide_forward", for_kinds<Lltm>(params->kind, params->product_kind, call)};
}

}  // namespace tch_extension::lltm
