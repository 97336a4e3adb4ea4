// The forward pass of LLTM in a grid, with products in half kinds: chooses the compiled kernel for
// a size.
#include "../recurrent/cells/lltm_cuda.h"
#include "../recurrent/grid/forward.h"
#include "kernels.h"

namespace tch_extension::lltm {
namespace {

using namespace recurrent;

struct GridForward {
  template <typename S, int kColumns, typename T, int kVectors, int kShared, int kGroup>
  static grid::Status start_of(const grid::ForwardParams& params, cudaStream_t stream) {
    return grid::start_forward<LltmOnCuda, S, kColumns,
                               grid::HalfForwardProduct<T, kColumns, kVectors, kShared, kGroup>>(
        params, stream);
  }

  // Launches the smallest kernel with at least this many vectors of a row for each lane.
  template <typename S, typename T>
  static grid::Status start(const grid::ForwardParams& params, int64_t vectors,
                            cudaStream_t stream) {
    if (params.columns == 32) {
      if (vectors <= 2) return start_of<S, 32, T, 2, 0, 2>(params, stream);
      if (vectors <= 3) return start_of<S, 32, T, 3, 0, 3>(params, stream);
      if (vectors <= 4) return start_of<S, 32, T, 4, 12, 2>(params, stream);
    } else {
      if (vectors <= 3) return start_of<S, 16, T, 3, 0, 3>(params, stream);
      if (vectors <= 4) return start_of<S, 16, T, 4, 0, 2>(params, stream);
      if (vectors <= 6) return start_of<S, 16, T, 6, 0, 6>(params, stream);
      if (vectors <= 8) return start_of<S, 16, T, 8, 14, 8>(params, stream);
    }
    return {true, kNoKernel};
  }
};

}  // namespace

extern "C" LaunchStatus tch_extension_lltm_grid_forward_cuda(const grid::ForwardParams* params,
                                                             bool* fits, cudaStream_t stream) {
  const grid::Call<GridForward, grid::ForwardParams> call{*params, params->hidden, fits, stream};
  return {"lltm_grid_forward", for_kinds(params->kind, params->product_kind, call)};
}

// Writes how many blocks `device` runs at the same time; 0 if it cannot run the kernels. `device`
// has to be the current device.
extern "C" const char* tch_extension_lltm_grid_device(int32_t device, int64_t* blocks) {
  using Product = grid::HalfForwardProduct<__half, 32, 4, 12, 2>;
  constexpr auto kLargest = grid::forward_kernel<LltmOnCuda, __half, Product, 32>;
  int major = 0, cooperative = 0, processors = 0, of_one = 0;
  *blocks = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Other GPUs have not been measured.
  if (major != 9 || cooperative == 0) return nullptr;
  cudaFuncAttributes code = {};
  error = cudaFuncGetAttributes(&code, kLargest);
  // Unless it is compiled for Hopper's own architecture, the kernel is empty and has no bias in
  // shared memory.
  if (error == cudaSuccess && code.sharedSizeBytes == 0) return nullptr;
  if (error == cudaSuccess) error = allow<kLargest>();
  constexpr size_t kBytes = grid::ForwardLayout<Product, 32>::kState;
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kLargest, grid::kGridThreads,
                                                          kBytes);
  }
  if (error == cudaSuccess) {
    *blocks = of_one > 0 ? processors : 0;
    return nullptr;
  }
  // Clear this query's error before the next launch check.
  (void)cudaGetLastError();
  return nullptr;
}

}  // namespace tch_extension::lltm
