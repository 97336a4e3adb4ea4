// The forward pass of an LSTM in clusters.
#include "../recurrent/cells/lstm_cuda.h"
#include "../recurrent/cluster/choose_forward.h"
#include "params.h"

extern "C" tch_extension::LaunchStatus tch_extension_lstm_cluster_forward_cuda(
    const tch_extension::recurrent::cluster::ForwardParams* params, cudaStream_t stream) {
  using namespace tch_extension::recurrent;
  const cluster::ChooseForward<LstmOnCuda> body{*params, stream};
  if (params->scales != nullptr) return {"lstm_cluster_forward", body.run<float, __half>()};
  return {"lstm_cluster_forward", for_kinds<LstmOnCuda>(params->kind, params->product_kind, body)};
}
