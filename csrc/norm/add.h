// Shared by the kernels of rows that are sums: their kinds, and vectors of them.
//
// T is the kind of the branch, of the output and of their gradients. S is the kind of the residual
// stream, of its gradients and of weight and bias: T, or float with a half kind.
#pragma once

#include "row_team.h"
#include "shifted.h"

namespace tch_extension::norm {
namespace {

// As many values of S as 16 bytes hold of T, in 16 bytes or two times 16.
template <typename T, typename S>
struct StreamVector {
  static constexpr int kLanes = kLanesOf16Bytes<T>;
  static constexpr int kPieces = kLanes * static_cast<int>(sizeof(S)) / 16;
  static constexpr int kLanesOfPiece = kLanes / kPieces;
  Vector<S, kLanesOfPiece> piece[kPieces];

  __device__ __forceinline__ S& lane(int index) {
    return piece[index / kLanesOfPiece].lane[index % kLanesOfPiece];
  }

  __device__ __forceinline__ static StreamVector load(const void* pointer, int64_t at) {
    StreamVector vector;
#pragma unroll
    for (int index = 0; index < kPieces; ++index) {
      vector.piece[index] =
          load_vector<S, kLanesOfPiece>(pointer, at + index * int64_t{kLanesOfPiece});
    }
    return vector;
  }

  __device__ __forceinline__ void store(void* pointer, int64_t at) const {
#pragma unroll
    for (int index = 0; index < kPieces; ++index) {
      auto* to = static_cast<S*>(pointer) + at + index * int64_t{kLanesOfPiece};
      *reinterpret_cast<Vector<S, kLanesOfPiece>*>(to) = piece[index];
    }
  }

  __device__ __forceinline__ Values<S, kLanes> values() const {
    Values<S, kLanes> all;
#pragma unroll
    for (int index = 0; index < kPieces; ++index) {
      const auto part = unpack<S, kLanesOfPiece>(piece[index]);
#pragma unroll
      for (int lane = 0; lane < kLanesOfPiece; ++lane)
        all.lane[index * kLanesOfPiece + lane] = part.lane[lane];
    }
    return all;
  }

  // Rounds.
  __device__ __forceinline__ static StreamVector of(const Values<S, kLanes>& values) {
    StreamVector vector;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) vector.lane(lane) = static_cast<S>(values.lane[lane]);
    return vector;
  }
};

// A parameter's values at a column, or `otherwise` if there is none.
template <typename T, typename S>
__device__ __forceinline__ auto stream_values_or(const void* pointer, int64_t at,
                                                 Compute<S> otherwise) {
  if (pointer != nullptr) return StreamVector<T, S>::load(pointer, at).values();
  Values<S, kLanesOf16Bytes<T>> values;
#pragma unroll
  for (Compute<S>& lane : values.lane) lane = otherwise;
  return values;
}

// Calls start(Type<T>{}, Type<S>{}); returns false for kinds that no kernel has.
template <typename Start>
bool with_kinds_of_sum(int32_t kind, int32_t stream_kind, Start start) {
  bool fits = false;
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if (stream_kind == kind) {
      fits = start(type, type);
    } else if (sizeof(T) == 2 && stream_kind == kTchExtensionFloat) {
      if constexpr (sizeof(T) == 2) fits = start(type, Type<float>{});
    }
  });
  return fits;
}

inline bool are_aligned(std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers) {
    if (!is_aligned_to_16(pointer)) return false;
  }
  return true;
}

}  // namespace
}  // namespace tch_extension::norm
