// Blocks of one cluster: their ranks, their barrier, and stores into one another's shared memory.
// Functions that check the architecture may be called by code for any GPU; before compute
// capability 9.0 they do nothing. The other functions are only for code for compute capability 9.0
// and newer.
#pragma once

#include "shared_memory.h"

namespace tch_extension::hopper {

// The rank of this block in its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The number of blocks of this block's cluster.
__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The same address in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

// The same as a pointer, for ordinary stores.
template <typename T>
__device__ __forceinline__ T* in_block(T* place, int block) {
#if __CUDA_ARCH__ >= 900
  const uint64_t here = reinterpret_cast<uint64_t>(place);
  uint64_t there;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(block));
  return reinterpret_cast<T*>(there);
#else
  return place;
#endif
}

// All threads of all blocks of the cluster arrive, and then wait. What a thread wrote before it
// arrived is visible to threads that have waited.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Arrives at an mbarrier of any block of the cluster, whose address in its own block is `barrier`.
// That orders no other accesses across blocks: with `.release.cluster`, the compiler would put a
// fence of the whole GPU before it.
__device__ __forceinline__ void mbarrier_arrive_in_block(uint32_t barrier, uint32_t block) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, block))
               : "memory");
}

// Stores to another block's shared memory, and counts the bytes at an mbarrier of that block.
__device__ __forceinline__ void store_async(uint32_t to, uint32_t barrier, uint4 value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t to, uint32_t barrier, float value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_async(uint32_t to, uint32_t barrier, double value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
      "l"(__double_as_longlong(value)), "r"(barrier)
      : "memory");
}

}  // namespace tch_extension::hopper
