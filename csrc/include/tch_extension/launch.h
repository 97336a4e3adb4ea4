// Helpers to launch CUDA kernels: a status that names the kernel, the type of a kind, grid sizes,
// alignment.
//
//   extern "C" tch_extension::LaunchStatus my_crate_scale(const ScaleParams* params,
//                                                         cudaStream_t stream) {
//     using namespace tch_extension;
//     for_kind(params->kind, [&](auto type) {
//       using T = typename decltype(type)::type;
//       scale_kernel<T><<<blocks_for(params->len), kThreads, 0, stream>>>(*params);
//     });
//     return launch_status("scale");
//   }
//
// Rust calls it through tch_extension::cuda::launch, which passes the current stream and makes an
// Err of a status that has an error.
//
// Needs: the CUDA toolkit; no torch header.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "tch_extension/kind.h"

namespace tch_extension {

// What a launcher returns. Both texts are static; `error` is null for success.
struct LaunchStatus {
  const char* kernel;
  const char* error;
};

// Must be called right after a launch. As everywhere in CUDA, it also reports errors of earlier
// asynchronous work.
inline LaunchStatus launch_status(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  return {kernel, error == cudaSuccess ? nullptr : cudaGetErrorString(error)};
}

// Calls body(Type<T>{}) with the element type of a kind.
template <typename Body>
inline void for_kind(int32_t kind, Body&& body) {
  dispatch_kind<__half, __nv_bfloat16>(kind, std::forward<Body>(body));
}

template <typename T>
struct ComputeOf {
  using type = T;
};
template <>
struct ComputeOf<__half> {
  using type = float;
};
template <>
struct ComputeOf<__nv_bfloat16> {
  using type = float;
};

// The type in which values of type T are computed: float for the half kinds, T itself otherwise.
// static_cast converts between the two.
template <typename T>
using Compute = typename ComputeOf<T>::type;

// Threads per block, unless a kernel asks for another number.
constexpr int kThreads = 256;

// The lanes of a warp, and the mask for shuffles and votes in which all of them take part.
constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;

// The number of blocks for `items` pieces of work, one per thread. If that exceeds CUDA's limit,
// the kernel needs a grid-stride loop for the rest.
inline unsigned int blocks_for(int64_t items) {
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  constexpr int64_t kMostBlocks = INT32_MAX;
  return static_cast<unsigned int>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

// kLanes values that one instruction loads or stores. The address must be a multiple of the
// vector's size.
template <typename T, int kLanes>
struct alignas(sizeof(T) * kLanes) Vector {
  T lane[kLanes];
};

template <typename T>
constexpr int kLanesOf16Bytes = 16 / sizeof(T);

// Whether vectors of kLanes values may be loaded from and stored to an address. A view with an
// offset may begin anywhere.
template <typename T, int kLanes>
inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector<T, kLanes>) == 0;
}

inline bool is_aligned_to_16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace tch_extension
