// The copies of the tensor memory accelerator (TMA) between global and shared memory: adjacent
// bytes, or whole boxes of a matrix that a tensor map describes (tensor_map.h). One thread starts
// them.
#pragma once

#include <cuda.h>

#include "barrier.h"

namespace tch_extension::hopper {

// Makes ordinary stores to shared memory, and initialized mbarriers, visible to bulk copies and to
// warpgroup products.
__device__ __forceinline__ void fence_for_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Loads the box at (x, y, batch), where x is the dimension whose elements are adjacent in memory.
// What is outside of the matrix becomes zeros. The mbarrier counts the bytes.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                         int x, int y, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], "
      "[%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(batch), "r"(barrier)
      : "memory");
}

// Loads the box into the same place of each block of the cluster that has its bit in `blocks`. The
// mbarrier of each of them, which is in the same place, too, counts the bytes.
__device__ __forceinline__ void load_box_for(uint32_t to, const CUtensorMap& map, uint32_t barrier,
                                             int x, int y, int batch, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(batch), "r"(barrier), "h"(blocks)
      : "memory");
}

// Loads adjacent bytes: a multiple of 16, from and to addresses that are such multiples. The
// mbarrier counts them.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
      : "memory");
}

// Stores the box at (x, y, batch), without what is outside of the matrix.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int x, int y,
                                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(from), "r"(x), "r"(y), "r"(batch)
      : "memory");
}

// Waits until the shared memory that this thread's stores read from may be written to again.
__device__ __forceinline__ void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until this thread's stores are complete.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace tch_extension::hopper
