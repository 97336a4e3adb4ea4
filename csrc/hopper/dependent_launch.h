// Programmatic dependent launch: a kernel that is launched with this attribute may start while the
// preceding kernel still runs. Before compute capability 9.0 these functions do nothing.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <utility>

namespace tch_extension::hopper {

// Waits until the preceding kernel is complete and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start as soon as all blocks have called this or have ended.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For each device, whether a kernel's code is for this compute capability or a newer one. All
// kernels of the library are compiled for the same ones.
template <int kMajor>
class CodeFor {
 public:
  // On the current device, which is queried once.
  bool is_there(const void* kernel) {
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
    int found = known[device].load(std::memory_order_relaxed);
    if (found == 0) {
      found = ask(device, kernel) ? 1 : -1;
      known[device].store(found, std::memory_order_relaxed);
    }
    return found == 1;
  }

 private:
  static bool ask(int device, const void* kernel) {
    int major = 0;
    // Code that the driver compiles from an older architecture's PTX does not wait.
    cudaFuncAttributes code = {};
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaFuncGetAttributes(&code, kernel) == cudaSuccess)
      return major >= kMajor && code.ptxVersion >= 10 * kMajor;
    // Clear this query's error before the next launch check.
    (void)cudaGetLastError();
    return false;
  }

  static constexpr int kDevices = 64;
  // 0 as long as it is unknown.
  std::atomic<int> known[kDevices] = {};
};

// Whether a kernel that waits may be launched with this attribute.
class DependentLaunches {
 public:
  bool are_possible(const void* kernel) { return code.is_there(kernel); }

 private:
  CodeFor<9> code;
};

// Starts a kernel that waits for the previous one before it reads or writes what others may write.
// It may begin before the previous one has ended. An error stays for the check of the launch.
template <typename... Params, typename... Arguments>
void launch_early(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared,
                  cudaStream_t stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  static DependentLaunches launches;
  config.numAttrs = launches.are_possible(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  (void)cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

// Whether a grid is so small that the launch is a large part of its time.
inline bool is_short(dim3 grid) {
  // One for each multiprocessor of a large GPU.
  constexpr unsigned int kBlocks = 132;
  return grid.x <= kBlocks && grid.y == 1 && grid.z == 1;
}

}  // namespace tch_extension::hopper
