// The backward of the grid in float and double, as they are.

#include "grid_backward.h"
#include "grid_plain.h"

namespace tch_extension {
namespace {

struct GridPlainBackward {
  template <typename T, int kVectors, int kHeld, int kRing, int kGroup>
  static GridStatus start_of(const LltmGridBackward& params, cudaStream_t stream) {
    return start_backward<T, GridPlainProduct<T, kTile / 2, kVectors, kHeld, kRing, kGroup>>(
        params, stream);
  }

  // With as many vectors of a row for each lane, or more.
  template <typename, typename T>
  static GridStatus start(const LltmGridBackward& params, int64_t vectors, cudaStream_t stream) {
    if (vectors <= 3) return start_of<T, 3, 3, 3, 3>(params, stream);
    if (vectors <= 6) return start_of<T, 6, 6, 6, 6>(params, stream);
    if (vectors <= 12) return start_of<T, 12, 10, 6, 3>(params, stream);
    if (vectors <= 18) return start_of<T, 18, 6, 9, 9>(params, stream);
    if (vectors <= 24) return start_of<T, 24, 6, 12, 6>(params, stream);
    return {true, kNoKernel};
  }
};

}  // namespace
}  // namespace tch_extension

// `fits` as in grid_forward.cu.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_plain_backward_cuda(
    const LltmGridBackward* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension;
  const GridCall<GridPlainBackward, LltmGridBackward, true> call{*params, kGates * params->hidden,
                                                                 fits, stream};
  return {"lltm_grid_plain_backward", for_kinds(params->kind, params->product_kind, call)};
}
