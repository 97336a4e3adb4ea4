// The functions that src/ops/add_layer_norm/kernels.rs calls.
#include "../norm/add_kernels.h"
#include "../norm/launch.h"
#include "add_layer_norm.h"

using tch_extension::LaunchStatus;
using namespace tch_extension::norm;

extern "C" LaunchStatus tch_extension_add_layer_norm_forward_cuda(const NormAddForward* params,
                                                                  cudaStream_t stream) {
  return launch_if_fits("add_layer_norm_forward", *params, stream, start_add_forward<LayerNorm>);
}

extern "C" LaunchStatus tch_extension_add_layer_norm_backward_cuda(const NormAddBackward* params,
                                                                   cudaStream_t stream) {
  return launch_if_fits("add_layer_norm_backward", *params, stream, start_add_backward<LayerNorm>);
}
