// Launches of clusters, and the padded size that a kernel is compiled for.
#pragma once

#include "../../hopper/cluster_launch.h"
#include "../launch.h"
#include "place.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent::cluster {
namespace {

// H', the padded hidden size that a kernel is compiled for; 0 if there is none for this hidden size
// and number of blocks.
inline int padded_size(int64_t hidden, int32_t cluster) {
  if (cluster != 8 && cluster != 16) return 0;
  if (hidden <= 128) return cluster == 8 ? 128 : 0;
  if (hidden <= 256) return 256;
  if (hidden <= 512) return 512;
  return cluster == 16 && hidden <= 768 ? 768 : 0;
}

using Launch = hopper::ClusterLaunch;

// More than half of the shared memory that a multiprocessor has for its blocks.
constexpr int kMoreThanHalf = 116 * 1024;

template <auto kKernel, typename Product, typename Params>
const char* start_clusters(const Params& params, int bytes, cudaStream_t stream) {
  cudaError_t error = allow<kKernel>();
  if (params.alone != 0 && bytes < kMoreThanHalf) bytes = kMoreThanHalf;
  if (error == cudaSuccess) {
    const int64_t clusters = ceil_div(params.batch, kRows);
    const Launch launch(Product::kThreads, bytes, Product::kCluster, clusters, stream);
    error = cudaLaunchKernelEx(&launch.config, kKernel, params);
  }
  // Also clears this launch's error before the next launch check.
  const LaunchStatus status = launch_status("");
  return error == cudaSuccess ? status.error : cudaGetErrorString(error);
}

}  // namespace
}  // namespace tch_extension::recurrent::cluster
