// The backward pass of LLTM in a wide grid.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/wide_grid/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_wide_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"lltm_grid_wide_backward", wide_grid::choose_backward<LltmOnCuda>(*params, fits, stream)};
}
