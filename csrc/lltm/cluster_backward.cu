// The backward pass of LLTM in clusters: chooses the compiled kernel for a size.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/cluster/backward.h"
#include "kernels.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct Backward {
  template <typename S, typename T>
  const char* run() const {
    const int padded = cluster::padded_size(params.hidden, params.cluster);
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
      return padded == 128 ? start<S, cluster::PlainBackwardProduct<LltmOnCuda, T, 128, 8>>()
                           : kNoKernel;
    } else {
      switch (padded) {
        case 128:
          return start<S, cluster::HalfBackwardProduct<LltmOnCuda, T, 128, 8>>();
        case 256:
          return params.cluster == 8
                     ? start<S, cluster::HalfBackwardProduct<LltmOnCuda, T, 256, 8>>()
                     : kNoKernel;
        case 512:
          if (params.cluster == 8)
            return start<S, cluster::HalfBackwardProduct<LltmOnCuda, T, 512, 8, 2>>();
          return start<S, cluster::HalfBackwardProduct<LltmOnCuda, T, 512, 16>>();
        case 768:
          return start<S, cluster::HalfBackwardProduct<LltmOnCuda, T, 768, 16, 2>>();
        default:
          return kNoKernel;
      }
    }
  }

  template <typename S, typename Product>
  const char* start() const {
    return cluster::start_clusters<cluster::backward_kernel<LltmOnCuda, S, Product>, Product>(
        params, cluster::BackwardLayout<Product>::kBytes, stream);
  }

  const cluster::BackwardParams& params;
  cudaStream_t stream;
};

}  // namespace

extern "C" LaunchStatus tch_extension_lltm_cluster_backward_cuda(
    const cluster::BackwardParams* params, cudaStream_t stream) {
  const Backward body{*params, stream};
  if (params->scales != nullptr) return {"backward_kernel", body.run<float, cluster::ScaledHalf>()};
  return {"lltm_cluster_backward", for_kinds(params->kind, params->product_kind, body)};
}

}  // namespace tch_extension::lltm
