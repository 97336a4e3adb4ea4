// The backward pass of an LSTM in clusters.
#include "../recurrent/cells/lstm_cuda.h"
#include "../recurrent/cluster/choose_backward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lstm_cluster_backward_cuda(
    const tch_extension::recurrent::cluster::BackwardParams* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  const cluster::ChooseBackward<LstmOnCuda> body{*params, stream};
  if (params->scales != nullptr)
    return {"lstm_cluster_backward", body.run<float, cluster::ScaledHalf>()};
  return {"lstm_cluster_backward", for_kinds<LstmOnCuda>(params->kind, params->product_kind, body)};
}
