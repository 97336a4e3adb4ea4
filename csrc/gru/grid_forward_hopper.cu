// The forward pass of a GRU in a grid, with products in half kinds.
#include "../recurrent/cells/gru_cuda.h"
#include "../recurrent/grid/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_gru_grid_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"gru_grid_forward", grid::choose_forward<GruOnCuda>(*params, fits, stream)};
}
