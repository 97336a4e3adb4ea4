// Neighbouring values that one thread of a CUDA kernel reads, computes with and writes together.
#pragma once

#include "tch_extension/launch.h"

namespace tch_extension {

// What a thread computes with.
template <typename T, int kLanes>
struct Values {
  Compute<T> lane[kLanes];
};

// `at` counts elements; the address must be a multiple of the vector's size.
template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_values(const void* pointer, int64_t at) {
  const auto stored = *reinterpret_cast<const Vector<T, kLanes>*>(static_cast<const T*>(pointer) + at);
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] = static_cast<Compute<T>>(stored.lane[lane]);
  return values;
}

// One value for all lanes.
template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> repeat_value(const void* pointer, int64_t at) {
  const auto value = static_cast<Compute<T>>(static_cast<const T*>(pointer)[at]);
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] = value;
  return values;
}

template <typename T, int kLanes>
__device__ __forceinline__ void store_values(void* pointer, int64_t at, const Values<T, kLanes>& values) {
  Vector<T, kLanes> rounded;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) rounded.lane[lane] = static_cast<T>(values.lane[lane]);
  *reinterpret_cast<Vector<T, kLanes>*>(static_cast<T*>(pointer) + at) = rounded;
}

}  // namespace tch_extension
