// What a ring of rows in shared memory needs: copies that nobody waits for.
#pragma once

#include <mutex>

#include "backward.h"
#include "shifted.h"

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
    static_cast<unsigned short*>(to)[i] =
        2 * i < bytes ? static_cast<const unsigned short*>(from)[i] : 0;
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

// As one access in any case: beside reads of the ring, which might be of the same memory for all
// that the compiler knows, a plain store of 16 bytes became four.
__device__ __forceinline__ void store_whole(void* to, const Words& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(words.word[0]), "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3])
               : "memory");
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
