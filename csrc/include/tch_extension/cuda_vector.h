// Vectors of adjacent values that one thread of a CUDA kernel reads, computes with and writes
// together.
//
//   // kLanes: kLanesOf16Bytes<T> if is_aligned<T, kLanes> for all arrays, otherwise 1.
//   template <typename T, int kLanes>
//   __global__ void twice(const void* x, void* y, int64_t len) {
//     const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kLanes;
//     if (at >= len) return;
//     const bool whole = at + kLanes <= len;
//     auto values = whole ? load_values<T, kLanes>(x, at) : load_tail<T, kLanes>(x, at, len - at);
//     for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] *= 2;
//     whole ? store_values<T, kLanes>(y, at, values)
//           : store_tail<T, kLanes>(y, at, len - at, values);
//   }
//
// Needs: the CUDA toolkit; no torch header.
#pragma once

#include "tch_extension/launch.h"

namespace tch_extension {

// The values of a vector in the type in which a thread computes.
template <typename T, int kLanes>
struct Values {
  Compute<T> lane[kLanes];
};

// Loads a vector without conversion. `at` counts elements; the address must be a multiple of the
// vector's size.
template <typename T, int kLanes>
__device__ __forceinline__ Vector<T, kLanes> load_vector(const void* pointer, int64_t at) {
  return *reinterpret_cast<const Vector<T, kLanes>*>(static_cast<const T*>(pointer) + at);
}

template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> values_of(const Vector<T, kLanes>& stored) {
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane)
    values.lane[lane] = static_cast<Compute<T>>(stored.lane[lane]);
  return values;
}

// The same. A bfloat16 is the upper half of a float, so that converting one takes one
// instruction here.
template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> unpack(const Vector<T, kLanes>& stored) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && kLanes % 2 == 0) {
    Values<T, kLanes> values;
    const auto* words = reinterpret_cast<const unsigned int*>(&stored);
#pragma unroll
    for (int word = 0; word < kLanes / 2; ++word) {
      values.lane[2 * word] = __uint_as_float(words[word] << 16);
      values.lane[2 * word + 1] = __uint_as_float(words[word] & 0xffff0000u);
    }
    return values;
  } else {
    return values_of(stored);
  }
}

// The first `count` values of a vector, which may be none, one by one; the rest are zero. Any
// address will do.
template <typename T, int kLanes>
__device__ __forceinline__ Vector<T, kLanes> load_part(const void* pointer, int64_t at,
                                                       int64_t count) {
  Vector<T, kLanes> vector;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    vector.lane[lane] = lane < count ? static_cast<const T*>(pointer)[at + lane] : T(0);
  }
  return vector;
}

template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_values(const void* pointer, int64_t at) {
  return values_of(load_vector<T, kLanes>(pointer, at));
}

// Loads one value into all lanes.
template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> repeat_value(const void* pointer, int64_t at) {
  const auto value = static_cast<Compute<T>>(static_cast<const T*>(pointer)[at]);
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] = value;
  return values;
}

template <typename T, int kLanes>
__device__ __forceinline__ void store_values(void* pointer, int64_t at,
                                             const Values<T, kLanes>& values) {
  Vector<T, kLanes> rounded;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) rounded.lane[lane] = static_cast<T>(values.lane[lane]);
  *reinterpret_cast<Vector<T, kLanes>*>(static_cast<T*>(pointer) + at) = rounded;
}

// Loads the first `count` values, fewer than kLanes, one by one, and sets the other lanes to zero.
// The address may have any alignment.
template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_tail(const void* pointer, int64_t at,
                                                       int64_t count) {
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    values.lane[lane] = lane < count
                            ? static_cast<Compute<T>>(static_cast<const T*>(pointer)[at + lane])
                            : Compute<T>(0);
  }
  return values;
}

// Stores the first `count` values one by one.
template <typename T, int kLanes>
__device__ __forceinline__ void store_tail(void* pointer, int64_t at, int64_t count,
                                           const Values<T, kLanes>& values) {
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lane < count) static_cast<T*>(pointer)[at + lane] = static_cast<T>(values.lane[lane]);
  }
}

}  // namespace tch_extension
