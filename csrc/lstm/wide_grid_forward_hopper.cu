// The forward pass of an LSTM in a wide grid. There is no backward pass: the weights do not fit.
#include "../recurrent/cells/lstm_cuda.h"
#include "../recurrent/wide_grid/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lstm_wide_grid_forward_cuda(
    const tch_extension::recurrent::grid::ForwardParams* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return {"lstm_wide_grid_forward",
          wide_grid::choose_forward<LstmOnCuda, wide_grid::TwoTiles>(*params, fits, stream)};
}
