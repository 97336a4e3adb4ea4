// The backward pass of LLTM in a grid, in float and double without rounding to a narrower kind:
// chooses the compiled kernel for a size.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/grid/backward.h"
#include "../recurrent/grid/plain.h"
#include "params.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct GridPlainBackward {
  template <typename T, int kVectors, int kHeld, int kRing, int kGroup>
  static grid::Status start_of(const grid::BackwardParams& params, cudaStream_t stream) {
    return grid::start_backward<LltmOnCuda, T,
                                grid::PlainProduct<T, kTile / 2, kVectors, kHeld, kRing, kGroup>>(
        params, stream);
  }

  // Launches the smallest kernel with at least this many vectors of a row for each lane.
  template <typename, typename T>
  static grid::Status start(const grid::BackwardParams& params, int64_t vectors,
                            cudaStream_t stream) {
    if (vectors <= 3) return start_of<T, 3, 3, 3, 3>(params, stream);
    if (vectors <= 6) return start_of<T, 6, 6, 6, 6>(params, stream);
    if (vectors <= 12) return start_of<T, 12, 10, 6, 3>(params, stream);
    if (vectors <= 18) return start_of<T, 18, 6, 9, 9>(params, stream);
    if (vectors <= 24) return start_of<T, 24, 6, 12, 6>(params, stream);
    return {true, kNoKernel};
  }
};

}  // namespace
}  // namespace tch_extension::lltm

extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_plain_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::lltm;
  const grid::Call<GridPlainBackward, grid::BackwardParams, true> call{
      *params, Lltm::kGates * params->hidden, fits, stream};
  return {"lltm_grid_plain_backward",
          for_kinds<LltmOnCuda>(params->kind, params->product_kind, call)};
}
