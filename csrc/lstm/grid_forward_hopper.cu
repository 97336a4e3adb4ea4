// The forward pass of an LSTM in a grid, with products in half kinds.
#include "../recurrent/cells/lstm_cuda.h"
#include "../recurrent/grid/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lstm_grid_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"lstm_grid_forward", grid::choose_forward<LstmOnCuda>(*params, fits, stream)};
}
