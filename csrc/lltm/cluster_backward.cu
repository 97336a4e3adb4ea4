// The backward pass of LLTM in clusters.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/cluster/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lltm_cluster_backward_cuda(
    const tch_extension::recurrent::cluster::BackwardParams* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  const cluster::ChooseBackward<LltmOnCuda> body{*params, stream};
  if (params->scales != nullptr)
    return {"lltm_cluster_backward", body.run<float, cluster::ScaledHalf>()};
  return {"lltm_cluster_backward", for_kinds<LltmOnCuda>(params->kind, params->product_kind, body)};
}
