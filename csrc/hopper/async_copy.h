// Copies from global to shared memory that a thread starts and waits for later, in groups that are
// completed in order. They exist from compute capability 8.0 on; code for older GPUs copies at
// once.
#pragma once

#include "shared_memory.h"

namespace tch_extension::hopper {

// Starts the copy of one value. Writes zero, and reads nothing, if it is not `valid`.
template <typename T>
__device__ __forceinline__ void copy_async(T* to, const T* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(T)), "r"(valid ? static_cast<int>(sizeof(T)) : 0)
               : "memory");
}

// Starts the copy of 16 bytes, of which only the first `bytes`, an even number, are read; the rest
// become zeros. The copy bypasses the L1 cache.
__device__ __forceinline__ void copy_16_bytes_async(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(bytes)
               : "memory");
#else
  for (int i = 0; i < 8; ++i) {
    static_cast<unsigned short*>(to)[i] =
        2 * i < bytes ? static_cast<const unsigned short*>(from)[i] : 0;
  }
#endif
}

// Starts the copy of 8 bytes, or writes zeros if they are not `valid`.
__device__ __forceinline__ void copy_8_bytes_async(void* to, const void* from, bool valid) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(valid ? 8 : 0)
               : "memory");
#else
  *static_cast<uint2*>(to) = valid ? *static_cast<const uint2*>(from) : make_uint2(0, 0);
#endif
}

// Ends a group: all copies that this thread has started since the last group.
__device__ __forceinline__ void commit_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the last kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace tch_extension::hopper
