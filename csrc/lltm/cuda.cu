// LLTM on CUDA with one kernel for each step.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/step/cuda.h"
#include "params.h"

using namespace tch_extension::recurrent;

extern "C" tch_extension::LaunchStatus tch_extension_lltm_step_forward_cuda(
    const step::ForwardParams* params, cudaStream_t stream) {
  return step::launch<LltmOnCuda>("lltm_step_forward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_lltm_step_backward_cuda(
    const step::BackwardParams* params, cudaStream_t stream) {
  return step::launch<LltmOnCuda>("lltm_step_backward", *params, stream);
}
