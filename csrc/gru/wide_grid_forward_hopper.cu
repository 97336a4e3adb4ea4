// The forward pass of a GRU in a wide grid.
#include "../recurrent/cells/gru_cuda.h"
#include "../recurrent/wide_grid/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_gru_wide_grid_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"gru_wide_grid_forward",
          wide_grid::choose_forward<GruOnCuda, wide_grid::OneTile>(*params, fits, stream)};
}
