// LLTM on CUDA with one kernel for each step.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/step/cuda.h"
#include "params.h"

namespace tch_extension::lltm {

using namespace recurrent::step;

extern "C" LaunchStatus tch_extension_lltm_step_forward_cuda(const ForwardParams* params,
                                                             cudaStream_t stream) {
  return launch<recurrent::LltmOnCuda>("lltm_step_forward", *params, stream);
}

extern "C" LaunchStatus tch_extension_lltm_step_backward_cuda(const BackwardParams* params,
                                                              cudaStream_t stream) {
  return launch<recurrent::LltmOnCuda>("lltm_step_backward", *params, stream);
}

}  // namespace tch_extension::lltm
