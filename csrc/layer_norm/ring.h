// What a ring of rows in shared memory needs: copies that nobody waits for.
#pragma once

#include "backward.h"

namespace tch_extension {
namespace {

// Starts a copy of 16 bytes, of which only the first `bytes` are read; the others are zeros.
__device__ __forceinline__ void start_copy(void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 800
  const auto shared = static_cast<unsigned int>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
               : "memory");
#else
  for (int i = 0; i < 8; ++i) {
    static_cast<unsigned short*>(to)[i] = 2 * i < bytes ? static_cast<const unsigned short*>(from)[i] : 0;
  }
#endif
}

__device__ __forceinline__ void end_of_copies_of_a_row() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the last `rows` rows are there.
__device__ __forceinline__ void wait_for_all_but(int rows) {
#if __CUDA_ARCH__ >= 800
  // The number is part of the instruction.
  if (rows >= 2) {
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  } else if (rows == 1) {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  } else {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
  }
#endif
}

}  // namespace
}  // namespace tch_extension
