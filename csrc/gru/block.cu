// A small layer of a GRU, both directions.
#include "../recurrent/block/backward.h"
#include "../recurrent/block/forward.h"
#include "../recurrent/cells/gru_cuda.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_gru_block_forward_cuda(
    const RecurrentBlockForward* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return block::forward<GruOnCuda>("gru_block_forward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_gru_block_backward_cuda(
    const RecurrentBlockBackward* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  return block::backward<GruOnCuda>("gru_block_backward", *params, stream);
}
