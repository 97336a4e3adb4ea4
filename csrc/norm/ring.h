// For ring buffers of rows in shared memory: asynchronous copies, and the opt-in to large shared
// memory.
#pragma once

#include <mutex>

#include "../hopper/async_copy.h"
#include "../hopper/memory.h"
#include "backward.h"
#include "shifted.h"

namespace tch_extension::norm {
namespace {

// A thread's vectors of one row of x, or of dy.
template <typename T>
constexpr int kVectorsOfThread = kBackwardValues<T> / kLanesOf16Bytes<T>;

// The bytes of a ring buffer of whole vectors: as many rows of x and of dy as the plan has stages.
template <typename T>
int bytes_of_ring(const NormPlan& plan) {
  return plan.stages * 2 * 16 * kVectorsOfThread<T> * plan.threads;
}

// Starts an asynchronous copy of 16 bytes. Only the first `bytes` of them are read; the remaining
// ones become zeros.
__device__ __forceinline__ void start_copy(void* to, const void* from, int bytes) {
  hopper::copy_16_bytes_async(to, from, bytes);
}

__device__ __forceinline__ void end_of_copies_of_a_row() { hopper::commit_copies(); }

// Waits until the copies of all but the last `rows` rows are complete.
__device__ __forceinline__ void wait_for_all_but(int rows) {
  // The number is an immediate operand of the instruction.
  if (rows >= 2) {
    hopper::wait_for_copies<2>();
  } else if (rows == 1) {
    hopper::wait_for_copies<1>();
  } else {
    hopper::wait_for_copies<0>();
  }
}

// Stores 16 bytes in one access. The compiler split a plain store into four, because it could not
// rule out that the store aliases the reads of the ring buffer around it.
__device__ __forceinline__ void store_whole(void* to, const Words& words) {
  hopper::store_16_bytes(to,
                         make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
}

// A kernel has to opt in to more than 48 KiB of shared memory, once per device.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  // The 48 KiB include the kernel's static arrays.
  constexpr int kDevices = 64, kAlwaysAllowed = 40 << 10;
  static std::mutex mutex;
  static int allowed[kDevices];
  if (bytes <= kAlwaysAllowed) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  // The lock is needed because the last call counts: one for fewer bytes would take away what
  // another thread was given.
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < kDevices && allowed[device] >= bytes) return cudaSuccess;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = bytes;
  return error;
}

}  // namespace
}  // namespace tch_extension::norm
