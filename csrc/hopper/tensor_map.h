// Tensor maps: the description of a matrix in memory, or of a batch of them, that the hardware's
// bulk copies (bulk_copy.h) take. The host makes them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "tch_extension/kind.h"

namespace tch_extension::hopper {

// A matrix, or a batch of them, of fp16 or bf16 values. Sizes and strides count elements.
struct MapOf {
  int32_t kind;
  const void* data;
  int64_t width;
  int64_t height;
  int64_t batches;
  int64_t row;    // from one row to the next
  int64_t batch;  // from one matrix to the next
};

using EncodeMap = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                               const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                               const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                               CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, found at run time because nothing here is linked to the driver; null if
// the driver does not have it.
inline EncodeMap encode_map() {
  static const EncodeMap found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned int kSince = 12000;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               kSince, cudaEnableDefault, &result);
    const bool is_there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<EncodeMap>(entry) : nullptr;
  }();
  return found;
}

inline bool can_make_maps() { return encode_map() != nullptr; }

// Makes the current device's context the current one of this thread. The runtime's functions do so
// by themselves, the driver's do not, and this may be the thread's first call.
inline bool bind_context() {
  thread_local int bound = -1;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device != bound) error = cudaSetDevice(device);
  // Clear this query's error before the next launch check.
  if (error != cudaSuccess)
    (void)cudaGetLastError();
  else
    bound = device;
  return error == cudaSuccess;
}

// Makes the map for boxes of this size, whose rows are 128 bytes, swizzled in shared memory.
// Returns false if the driver refuses.
inline bool make_map(CUtensorMap& map, const MapOf& of, uint32_t columns, uint32_t rows) {
  constexpr cuuint64_t kBytes = 2;
  // A single matrix needs no stride between matrices, but the driver requires a valid one.
  const int64_t batch = of.batches == 1 ? of.row : of.batch;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(of.width), static_cast<cuuint64_t>(of.height),
                              static_cast<cuuint64_t>(of.batches)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(of.row) * kBytes,
                                static_cast<cuuint64_t>(batch) * kBytes};
  const cuuint32_t box[] = {columns, rows, 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const auto type = of.kind == kTchExtensionHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return encode_map()(&map, type, 3, const_cast<void*>(of.data), sizes, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace tch_extension::hopper
