// Kernels from images that any compiler made: loaded, asked for their limits and parameters, and
// launched.
#ifdef TCH_EXTENSION_CUDA

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "../ffi.h"
#include "attribute.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// What a kernel takes on a device. src/ffi/kernel.rs mirrors it.
struct tch_extension::KernelFacts {
  int32_t capability;   // 10 * major + minor
  int32_t max_threads;  // in a block
  int64_t static_shared;
  int64_t max_shared;  // the most dynamic shared memory that a block can have
  int64_t params;      // their number, which may exceed that of `sizes`; -1 if CUDA does not tell
  int64_t sizes[1024];
};

// How a kernel is launched. src/ffi/kernel.rs mirrors it.
struct tch_extension::KernelGrid {
  uint32_t blocks[3];
  uint32_t threads[3];
  uint32_t cluster[3];  // 0: no cluster is asked for
  uint64_t shared;
};

namespace {

// Loading allocates, which CUDA refuses in a thread that captures unless it asks for it. Neither
// the loading nor what it allocates becomes part of the graph.
using Relaxed = c10::cuda::CUDAStreamCaptureModeGuard;

// Larger clusters do not fit on every GPU with clusters, and CUDA refuses them unless a kernel is
// said to allow them.
void allow_cluster(cudaKernel_t kernel, int device, uint64_t blocks) {
  constexpr uint64_t kPortable = 8;
  if (blocks <= kPortable) return;
  check(cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1,
                                        device));
}

}  // namespace

// `image` is a cubin or a fatbin whose extent was checked, or a PTX text that ends with a zero.
// CUDA copies it.
TCH_EXTENSION_API Message tch_extension_cuda_library_load(const void* image,
                                                          cudaLibrary_t* library) {
  return guard([&] {
    Relaxed relaxed{cudaStreamCaptureModeRelaxed};
    check(cudaLibraryLoadData(library, image, nullptr, nullptr, 0, nullptr, nullptr, 0));
  });
}

// Sets `kernel` to null if the library has none of this name.
TCH_EXTENSION_API Message tch_extension_cuda_library_kernel(cudaLibrary_t library, const char* name,
                                                            cudaKernel_t* kernel) {
  return guard([&] {
    Relaxed relaxed{cudaStreamCaptureModeRelaxed};
    const cudaError_t error = cudaLibraryGetKernel(kernel, library, name);
    if (error == cudaErrorSymbolNotFound) {
      cudaGetLastError();
      *kernel = nullptr;
      return;
    }
    check(error);
  });
}

// The names of a library's kernels, separated by ", ", which the caller owns; or null.
TCH_EXTENSION_API Message tch_extension_cuda_library_names(cudaLibrary_t library) {
  Message names = nullptr;
  const Message message = guard([&] {
    unsigned int count = 0;
    check(cudaLibraryGetKernelCount(&count, library));
    std::vector<cudaKernel_t> kernels(count);
    check(cudaLibraryEnumerateKernels(kernels.data(), count, library));
    std::string all;
    for (cudaKernel_t kernel : kernels) {
      const char* name = nullptr;
      check(cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel)));
      if (!all.empty()) all += ", ";
      all += name;
    }
    names = strdup(all.c_str());
  });
  free(message);
  return names;
}

// Loads the kernel on `device`, which must be current, and allows it all shared memory there is.
TCH_EXTENSION_API Message tch_extension_cuda_kernel_prepare(cudaKernel_t kernel, int32_t device,
                                                            KernelFacts* facts) {
  return guard([&] {
    Relaxed relaxed{cudaStreamCaptureModeRelaxed};
    facts->capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                        attribute(cudaDevAttrComputeCapabilityMinor, device);
    const auto function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, function));
    facts->max_threads = attributes.maxThreadsPerBlock;
    facts->static_shared = static_cast<int64_t>(attributes.sharedSizeBytes);
    const int64_t optin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    facts->max_shared = std::max<int64_t>(optin - facts->static_shared, 0);
    // It only permits: how much of a launch is shared memory does not change.
    check(cudaKernelSetAttributeForDevice(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(facts->max_shared), device));
    // Of a size that is part of the image (__cluster_dims__), a launch knows nothing.
    allow_cluster(kernel, device,
                  uint64_t(attributes.requiredClusterWidth) * attributes.requiredClusterHeight *
                      attributes.requiredClusterDepth);
    facts->params = 0;
    size_t offset = 0;
    size_t size = 0;
    cudaError_t error;
    while ((error = cudaFuncGetParamInfo(function, facts->params, &offset, &size)) == cudaSuccess) {
      if (facts->params < static_cast<int64_t>(std::size(facts->sizes))) {
        facts->sizes[facts->params] = static_cast<int64_t>(size);
      }
      facts->params += 1;
    }
    // The first index without a parameter is an invalid value.
    if (error != cudaErrorInvalidValue) facts->params = -1;
    cudaGetLastError();
  });
}

// Launches the kernel on a stream of the current device. `params` are the addresses of its
// parameters, which CUDA copies.
TCH_EXTENSION_API Message tch_extension_cuda_kernel_launch(cudaKernel_t kernel, int32_t device,
                                                           const KernelGrid* grid, void** params,
                                                           cudaStream_t stream) {
  return guard([&] {
    cudaLaunchConfig_t config = {};
    config.gridDim = {grid->blocks[0], grid->blocks[1], grid->blocks[2]};
    config.blockDim = {grid->threads[0], grid->threads[1], grid->threads[2]};
    config.dynamicSmemBytes = grid->shared;
    config.stream = stream;
    cudaLaunchAttribute cluster = {};
    const auto [x, y, z] = grid->cluster;
    if (x != 0) {
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim.x = x;
      cluster.val.clusterDim.y = y;
      cluster.val.clusterDim.z = z;
      config.attrs = &cluster;
      config.numAttrs = 1;
      allow_cluster(kernel, device, uint64_t{x} * y * z);
    }
    check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), params));
  });
}

#endif  // TCH_EXTENSION_CUDA
