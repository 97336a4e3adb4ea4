// The functions that src/ops/layer_norm/kernels.rs calls. Each way's kernels are compiled in a file
// of their own.
#include "../norm/launch.h"
#include "layer_norm.h"

using tch_extension::LaunchStatus;
using namespace tch_extension::norm;

extern "C" LaunchStatus tch_extension_layer_norm_forward_cuda(const NormForward* params,
                                                              cudaStream_t stream) {
  return launch("layer_norm_forward", *params, stream, start_forward<LayerNorm>);
}

extern "C" LaunchStatus tch_extension_layer_norm_backward_cuda(const NormBackward* params,
                                                               cudaStream_t stream) {
  return launch("layer_norm_backward", *params, stream, start_backward<LayerNorm>);
}

extern "C" LaunchStatus tch_extension_layer_norm_finish_cuda(const NormBackward* params,
                                                             cudaStream_t stream) {
  return launch("layer_norm_finish", *params, stream, start_parameter_gradients<LayerNorm>);
}

// How many clusters of a backward plan the current device can run at a time; 0 if none.
extern "C" int64_t tch_extension_layer_norm_clusters_cuda(const NormPlan* plan, int32_t kind) {
  return clusters_at_a_time<LayerNorm>(*plan, kind);
}
