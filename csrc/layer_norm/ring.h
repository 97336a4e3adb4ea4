// What a ring of rows in shared memory and a cluster of blocks need: copies that nobody waits for, and stores
// into another block.
#pragma once

#include "backward.h"

namespace tch_extension {
namespace {

constexpr int kMostInCluster = 8;

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

__device__ __forceinline__ void cluster_barrier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The same place in the shared memory of another block of the cluster.
template <typename C>
__device__ __forceinline__ void store_in_block(Pair<C>* place, int block, Pair<C> value) {
#if __CUDA_ARCH__ >= 900
  const uint64_t here = reinterpret_cast<uint64_t>(place);
  uint64_t there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(block));
  *reinterpret_cast<Pair<C>*>(there) = value;
#endif
}

}  // namespace
}  // namespace tch_extension
