// What a ring of rows in shared memory needs: copies that nobody waits for.
#pragma once

#include <mutex>

#include "../hopper/async_copy.h"
#include "../hopper/memory.h"
#include "backward.h"
#include "shifted.h"

namespace tch_extension {
namespace {

// Starts a copy of 16 bytes, of which only the first `bytes` are read; the others are zeros.
__device__ __forceinline__ void start_copy(void* to, const void* from, int bytes) {
  hopper::copy_16_bytes_async(to, from, bytes);
}

__device__ __forceinline__ void end_of_copies_of_a_row() { hopper::commit_copies(); }

// Until all but the last `rows` rows are there.
__device__ __forceinline__ void wait_for_all_but(int rows) {
  // The number is part of the instruction.
  if (rows >= 2) {
    hopper::wait_for_copies<2>();
  } else if (rows == 1) {
    hopper::wait_for_copies<1>();
  } else {
    hopper::wait_for_copies<0>();
  }
}

// As one access in any case: beside reads of the ring, which might be of the same memory for all
// that the compiler knows, a plain store of 16 bytes became four.
__device__ __forceinline__ void store_whole(void* to, const Words& words) {
  hopper::store_16_bytes(to,
                         make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]));
}

// More than 48 KiB of shared memory have to be asked for, once for each kernel and device.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  // The limit counts the kernel's own arrays, too.
  constexpr int kDevices = 64, kAlwaysAllowed = 40 << 10;
  static std::mutex mutex;
  static int allowed[kDevices];
  if (bytes <= kAlwaysAllowed) return cudaSuccess;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  // One at a time: the last call counts, and one for fewer bytes would take away what another was
  // given.
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < kDevices && allowed[device] >= bytes) return cudaSuccess;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = bytes;
  return error;
}

}  // namespace
}  // namespace tch_extension
