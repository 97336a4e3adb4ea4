// The configuration of a launch of clusters, for cudaLaunchKernelEx and for questions about it. It
// points into itself, so that it cannot be copied.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace tch_extension::hopper {

struct ClusterLaunch {
  ClusterLaunch(int threads, int bytes, int cluster, int64_t clusters, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned int>(clusters * cluster));
    config.blockDim = dim3(static_cast<unsigned int>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned int>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;

  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
};

}  // namespace tch_extension::hopper
