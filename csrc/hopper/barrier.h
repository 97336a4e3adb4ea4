// Barriers within a block: the 16 named barriers of the hardware, and mbarriers, which are objects
// in shared memory that count arrivals and bytes. An mbarrier is given by its 32-bit address.
#pragma once

#include "shared_memory.h"

namespace tch_extension::hopper {

// Waits until `threads` threads, in whole warps, have arrived at the named barrier. __syncthreads
// uses number 0.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at the named barrier and goes on without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Initializes a barrier. Its phase is over after kArrivals arrivals, when all bytes that these
// announced have also arrived.
template <int kArrivals>
__device__ __forceinline__ void mbarrier_init(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "n"(kArrivals) : "memory");
}

// Makes initialized mbarriers visible to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that asynchronous copies or stores will bring in this phase.
__device__ __forceinline__ void mbarrier_arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is over. The hardware waits for a while before it returns false.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
      "selp.u32 %0, 1, 0, over;\n}"
      : "=r"(is_over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_over != 0;
}

// Waits until the phase of this parity is over. A barrier begins in phase 0, so that waiting for
// parity 1 then returns at once.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

}  // namespace tch_extension::hopper
