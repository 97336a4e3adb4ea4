// The backward pass of a GRU in a wide grid.
#include "../recurrent/cells/gru_cuda.h"
#include "../recurrent/wide_grid/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_gru_wide_grid_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"gru_wide_grid_backward", wide_grid::choose_backward<GruOnCuda>(*params, fits, stream)};
}
