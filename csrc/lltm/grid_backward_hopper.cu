// The backward pass of LLTM in a grid, with products in half kinds.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/grid/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"lltm_grid_backward", grid::choose_backward<LltmOnCuda>(*params, fits, stream)};
}
