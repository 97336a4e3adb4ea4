// The forward pass of LLTM in clusters.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/cluster/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lltm_cluster_forward_cuda(
    const tch_extension::recurrent::cluster::ForwardParams* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  const cluster::ChooseForward<LltmOnCuda> body{*params, stream};
  return {"lltm_cluster_forward", for_kinds<LltmOnCuda>(params->kind, params->product_kind, body)};
}
