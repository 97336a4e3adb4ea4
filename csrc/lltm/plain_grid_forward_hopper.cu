// The forward pass of LLTM in a grid, in float and double without rounding to a narrower kind:
// chooses the compiled kernel for a size.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/grid/forward.h"
#include "../recurrent/grid/plain.h"
#include "params.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct GridPlainForward {
  template <typename T, int kColumns, int kVectors, int kHeld>
  static grid::Status start_of(const grid::ForwardParams& params, cudaStream_t stream) {
    using Product =
        grid::PlainProduct<T, Lltm::kGates * kColumns / 2, kVectors, kHeld, kVectors, kVectors>;
    return grid::start_forward<LltmOnCuda, T, kColumns, Product>(params, stream);
  }

  // Launches the smallest kernel with at least this many vectors of a row for each lane. Blocks of
  // few columns are for few rows: there are then enough blocks, and none of them waits long for a
  // product.
  template <typename, typename T>
  static grid::Status start(const grid::ForwardParams& params, int64_t vectors,
                            cudaStream_t stream) {
    // Sums in double leave less room for weights in shared memory.
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
}  // namespace tch_extension::lltm

extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_plain_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::lltm;
  const grid::Call<GridPlainForward, grid::ForwardParams, true> call{*params, params->hidden, fits,
                                                                     stream};
  return {"lltm_grid_plain_forward",
          for_kinds<LltmOnCuda>(params->kind, params->product_kind, call)};
}
