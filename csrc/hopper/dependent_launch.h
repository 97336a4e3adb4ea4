// Programmatic dependent launch: a kernel that is launched with this attribute may start while the
// preceding kernel still runs. Before compute capability 9.0 these functions do nothing.
#pragma once

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

}  // namespace tch_extension::hopper
