// The backward pass of an LSTM in a grid, with products in half kinds.
#include "../recurrent/cells/lstm_cuda.h"
#include "../recurrent/grid/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lstm_grid_backward_cuda(
    const tch_extension::recurrent::grid::BackwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"lstm_grid_backward", grid::choose_backward<LstmOnCuda>(*params, fits, stream)};
}
