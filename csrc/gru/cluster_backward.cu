// The backward pass of a GRU in clusters.
#include "../recurrent/cells/gru_cuda.h"
#include "../recurrent/cluster/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_gru_cluster_backward_cuda(
    const tch_extension::recurrent::cluster::BackwardParams* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  const cluster::ChooseBackward<GruOnCuda> body{*params, stream};
  if (params->scales != nullptr)
    return {"gru_cluster_backward", body.run<float, cluster::ScaledHalf>()};
  return {"gru_cluster_backward", for_kinds<GruOnCuda>(params->kind, params->product_kind, body)};
}
