// The forward pass of LLTM in clusters: chooses the compiled kernel for a size.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/cluster/forward.h"
#include "kernels.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct Forward {
  template <typename S, typename T>
  const char* run() const {
    const int padded = cluster::padded_size(params.hidden, params.cluster);
    if constexpr (sizeof(T) > 2) {
      if (padded == 128 && params.cluster == 8)
        return start<S, cluster::PlainForwardProduct<LltmOnCuda, T, 128, 8, 4>>();
      return params.cluster == 16 && padded == 256
                 ? start<S, cluster::PlainForwardProduct<LltmOnCuda, T, 256, 16, 8>>()
                 : kNoKernel;
    } else {
      switch (padded) {
        case 128:
          return start<S, cluster::HalfForwardProduct<LltmOnCuda, T, 128, 8>>();
        case 256:
          return params.cluster == 8
                     ? start<S, cluster::HalfForwardProduct<LltmOnCuda, T, 256, 8>>()
                     : kNoKernel;
        case 512:
          if (params.cluster == 8)
            return start<S, cluster::HalfForwardProduct<LltmOnCuda, T, 512, 8>>();
          return start<S, cluster::HalfForwardProduct<LltmOnCuda, T, 512, 16>>();
        case 768:
          return start<S, cluster::HalfForwardProduct<LltmOnCuda, T, 768, 16>>();
        default:
          return kNoKernel;
      }
    }
  }

  template <typename S, typename Product>
  const char* start() const {
    return cluster::start_clusters<cluster::forward_kernel<LltmOnCuda, S, Product>, Product>(
        params, cluster::ForwardLayout<Product>::kBytes, stream);
  }

  const cluster::ForwardParams& params;
  cudaStream_t stream;
};

// How many clusters of the largest kernel for half kinds the device runs at a time. It is 0 if CUDA
// reports an error instead, as it may for clusters of 16.
template <typename Product>
int clusters_at_a_time() {
  constexpr auto kKernel = cluster::forward_kernel<LltmOnCuda, __half, Product>;
  cudaFuncAttributes code = {};
  cudaError_t error = cudaFuncGetAttributes(&code, kKernel);
  // A kernel that was compiled for an older architecture is empty.
  if (error == cudaSuccess && code.ptxVersion < 90) return 0;
  if (error == cudaSuccess) error = allow<kKernel>();
  int clusters = 0;
  const cluster::Launch launch(Product::kThreads, cluster::ForwardLayout<Product>::kBytes,
                               Product::kCluster, 1, nullptr);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config);
  if (error == cudaSuccess) return clusters;
  // Clear this query's error before the next launch check.
  (void)cudaGetLastError();
  return 0;
}

}  // namespace

extern "C" LaunchStatus tch_extension_lltm_cluster_forward_cuda(
    const cluster::ForwardParams* params, cudaStream_t stream) {
  const Forward body{*params, stream};
  return {"lltm_cluster_forward", for_kinds(params->kind, params->product_kind, body)};
}

// Writes how many clusters of 8 blocks, and of 16, `device` runs at a time; zeros if it cannot run
// the kernels. `device` has to be the current device.
extern "C" const char* tch_extension_lltm_cluster_device(int32_t device, int64_t* clusters) {
  int major = 0;
  clusters[0] = clusters[1] = 0;
  const cudaError_t error =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Other GPUs have not been measured, and have less shared memory.
  if (major != 9) return nullptr;
  clusters[0] = clusters_at_a_time<cluster::HalfForwardProduct<LltmOnCuda, __half, 512, 8>>();
  clusters[1] = clusters_at_a_time<cluster::HalfForwardProduct<LltmOnCuda, __half, 768, 16>>();
  return nullptr;
}

}  // namespace tch_extension::lltm
