// An LSTM's layer on CUDA with one kernel for each step.
#include "../recurrent/cells/lstm_cuda.h"
#include "../recurrent/step/cuda.h"
#include "params.h"

using namespace tch_extension::recurrent;

extern "C" tch_extension::LaunchStatus tch_extension_lstm_step_forward_cuda(
    const step::ForwardParams* params, cudaStream_t stream) {
  return step::launch<LstmOnCuda>("lstm_step_forward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_lstm_step_backward_cuda(
    const step::BackwardParams* params, cudaStream_t stream) {
  return step::launch<LstmOnCuda>("lstm_step_backward", *params, stream);
}
