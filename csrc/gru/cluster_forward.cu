// The forward pass of a GRU in clusters.
#include "../recurrent/cells/gru_cuda.h"
#include "../recurrent/cluster/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_gru_cluster_forward_cuda(
    const tch_extension::recurrent::cluster::ForwardParams* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  const cluster::ChooseForward<GruOnCuda> body{*params, stream};
  if (params->scales != nullptr) return {"gru_cluster_forward", body.run<float, __half>()};
  return {"gru_cluster_forward", for_kinds<GruOnCuda>(params->kind, params->product_kind, body)};
}
