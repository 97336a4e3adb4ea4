// A small layer of an LSTM, both directions.
#include "../recurrent/block/backward.h"
#include "../recurrent/block/forward.h"
#include "../recurrent/cells/lstm_cuda.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lstm_block_forward_cuda(
    const RecurrentBlockForward* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return block::forward<LstmOnCuda>("lstm_block_forward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_lstm_block_backward_cuda(
    const RecurrentBlockBackward* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return block::backward<LstmOnCuda>("lstm_block_backward", *params, stream);
}
