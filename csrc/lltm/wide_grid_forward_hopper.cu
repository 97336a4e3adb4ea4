// The forward pass of LLTM in a wide grid.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/wide_grid/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_wide_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"lltm_grid_wide_forward",
          wide_grid::choose_forward<LltmOnCuda, wide_grid::OneTile>(*params, fits, stream)};
}
