// An attribute of a device, as CUDA tells it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>

namespace tch_extension {

// CUDA keeps an error until somebody asks, so it is cleared here. A later launch would report it.
inline void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(cudaGetErrorString(error));
}

inline int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

// The same, or 0 where CUDA does not tell it.
inline uint32_t known_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, device) != cudaSuccess) cudaGetLastError();
  return value < 0 ? 0 : static_cast<uint32_t>(value);
}

}  // namespace tch_extension
