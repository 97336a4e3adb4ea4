// The threads of a block: which column each of them has, and what all of them do together.
#pragma once

#include "params.h"
#include "tch_extension/launch.h"

namespace tch_extension::recurrent::block {
namespace {

// How many threads have a column. They are lanes of one warp.
constexpr int kParts = 4;

// How many steps ahead values are loaded, so that no step waits for memory; an even number, because
// shared memory has buffers for two steps.
constexpr int kAhead = 4;

// kSize is the number of columns, of h and of the input, that a kernel is compiled for. There are
// zeros in the place of columns that are not there.
template <int kSize>
struct Team {
  enum : int {
    kThreads = kSize * kParts,
    // Of a sum over columns, how many terms a thread has.
    kTerms = kSize / kParts,
  };

  // What was written to shared memory before can be read after it.
  static __device__ __forceinline__ void wait() {
    if constexpr (kThreads == kWarp) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ Team()
      : column(static_cast<int>(threadIdx.x) / kParts),
        part(static_cast<int>(threadIdx.x) % kParts),
        first_term(part * kTerms) {}

  const int column, part, first_term;
};

template <typename G>
__device__ __forceinline__ G sum_of_parts(G value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// The value of the thread that has this part of the same column.
template <typename G>
__device__ __forceinline__ G of_part(G value, int part) {
  return __shfl_sync(kAllLanes, value, part, kParts);
}

// values[index] for an index that is not known to the compiler, without local memory.
template <typename G, int kCount>
__device__ __forceinline__ G select(const G (&values)[kCount], int index) {
  G value = values[0];
#pragma unroll
  for (int other = 1; other < kCount; ++other) value = index == other ? values[other] : value;
  return value;
}

// A thread's terms of a row in shared memory, 16 bytes at a time where there are as many.
template <int kTerms, typename G>
__device__ __forceinline__ void load_terms(G (&terms)[kTerms], const G* from) {
  constexpr int kLanes = kTerms < kLanesOf16Bytes<G> ? kTerms : kLanesOf16Bytes<G>;
#pragma unroll
  for (int term = 0; term < kTerms; term += kLanes) {
    const auto vector = *reinterpret_cast<const Vector<G, kLanes>*>(from + term);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) terms[term + lane] = vector.lane[lane];
  }
}

// Whether a thread's registers have room for the gradients of its weights, too.
template <typename G, int kSize>
constexpr bool kSumsWeights = kSize * sizeof(G) <= 128;

// A kernel's kind and number of columns.
template <typename T, int kColumns>
struct Kernel {
  using Element = T;
  enum : int { kSize = kColumns };
};

// Calls body(Kernel<T, kSize>{}) for a kind and a number of columns, and returns an error if there
// is no kernel: registers have no room for the weights of more columns.
template <typename Body>
const char* for_kernels(int32_t kind, int64_t columns, const Body& body) {
  bool is_there = true;
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if (columns <= 8) {
      body(Kernel<T, 8>{});
    } else if (columns <= 16) {
      body(Kernel<T, 16>{});
    } else if (columns <= 32) {
      body(Kernel<T, 32>{});
    } else if (sizeof(T) < sizeof(double) && columns <= 64) {
      if constexpr (sizeof(T) < sizeof(double)) body(Kernel<T, 64>{});
    } else {
      is_there = false;
    }
  });
  return is_there ? nullptr : "internal error: a layer that is too large for one block";
}

}  // namespace
}  // namespace tch_extension::recurrent::block
