// The forward of the grid in float and double, as they are.

#include "grid_forward.h"
#include "grid_plain.h"

namespace tch_extension {
namespace {

struct GridPlainForward {
  template <typename T, int kColumns, int kVectors, int kHeld>
  static GridStatus start_of(const LltmGridForward& params, cudaStream_t stream) {
    using Product = GridPlainProduct<T, kGates * kColumns / 2, kVectors, kHeld, kVectors, kVectors>;
    return start_forward<T, kColumns, Product>(params, stream);
  }

  // With as many vectors of a row for each lane, or more. Few columns are for few rows: then there
  // are blocks enough, and none waits long for a product.
  template <typename, typename T>
  static GridStatus start(const LltmGridForward& params, int64_t vectors, cudaStream_t stream) {
    // Sums of double leave less room for weights in shared memory.
    constexpr int kHeldOfMost = sizeof(T) == 8 ? 12 : 6;
    switch (params.columns) {
      case 4:
        if (vectors <= 2) return start_of<T, 4, 2, 2>(params, stream);
        if (vectors <= 4) return start_of<T, 4, 4, 4>(params, stream);
        break;
      case 6:
        if (vectors <= 6) return start_of<T, 6, 6, 6>(params, stream);
        break;
      case 16:
        if (vectors <= 1) return start_of<T, 16, 1, 3>(params, stream);
        if (vectors <= 2) return start_of<T, 16, 2, 6>(params, stream);
        if (vectors <= 4) return start_of<T, 16, 4, 12>(params, stream);
        if (vectors <= 6) return start_of<T, 16, 6, 10>(params, stream);
        if (vectors <= 8) return start_of<T, 16, 8, kHeldOfMost>(params, stream);
        break;
    }
    return {true, kNoKernel};
  }
};

}  // namespace
}  // namespace tch_extension

// `fits` as in grid_forward.cu.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_plain_forward_cuda(
    const LltmGridForward* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension;
  const GridCall<GridPlainForward, LltmGridForward, true> call{*params, params->hidden, fits,
                                                               stream};
  return {"lltm_grid_plain_forward", for_kinds(params->kind, params->product_kind, call)};
}
