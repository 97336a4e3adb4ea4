// Shared by the kernels of the backward pass.
#pragma once

#include "../hopper/dependent_launch.h"
#include "row_team.h"

namespace tch_extension::norm {
namespace {

// Whether there are moments. Only the gradient of the bias does without.
template <typename Norm, typename Params>
__device__ __forceinline__ bool has_moments(const Params& params) {
  return (Norm::kCentred ? params.mean : params.rstd) != nullptr;
}

// A row's mean, or zero if rows are not centred, and rstd; zeros if there are no moments.
template <typename Norm, typename C, typename Params>
__device__ __forceinline__ Pair<C> kept_moments(const Params& params, int64_t row) {
  if (!has_moments<Norm>(params)) return {C(0), C(0)};
  const C mean = Norm::kCentred ? static_cast<const C*>(params.mean)[row] : C(0);
  return {mean, static_cast<const C*>(params.rstd)[row]};
}

// Stores the sums in vectors of up to 16 bytes: a single value would be a separate write to the L2
// cache.
template <typename C, int kLanes>
__device__ __forceinline__ void store_sums(C* to, const C (&sums)[kLanes]) {
  constexpr int kTogether = kLanes < kLanesOf16Bytes<C> ? kLanes : kLanesOf16Bytes<C>;
#pragma unroll
  for (int first = 0; first < kLanes; first += kTogether) {
    Vector<C, kTogether> vector;
#pragma unroll
    for (int lane = 0; lane < kTogether; ++lane) vector.lane[lane] = sums[first + lane];
    *reinterpret_cast<Vector<C, kTogether>*>(to + first) = vector;
  }
}

// Adds up the teams' sums over rows and writes the block's part, `columns` values. For each v, a
// thread has the sums of kLanes columns from `index(v)` · kLanes on. `buffer` has room for the sums
// of all threads. kShifted: the part may begin at any address.
template <bool kShifted, typename C, int kVectors, int kLanes, typename Index>
__device__ __forceinline__ void write_block_part(const C (&sums)[kVectors][kLanes], C* part,
                                                 int columns, int team, C* buffer, Index index) {
  const int vectors = (columns + kLanes - 1) / kLanes, teams = teams_of_block(team);
  const bool is_whole = teams == 1 && !kShifted;
  C* to = is_whole ? part : buffer + team_of_block(team) * vectors * kLanes;
  if (!is_whole) __syncthreads();
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (index(v) < vectors) store_sums<C, kLanes>(to + index(v) * kLanes, sums[v]);
  }
  if (is_whole) return;
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    // Eight partial sums, then a tree of them: shorter chains of additions lose less precision.
    // `teams` is a power of two.
    constexpr int kSums = 8;
    C total[kSums] = {};
    for (int first = 0; first < teams; first += kSums) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        if (first + i < teams) total[i] += buffer[(first + i) * vectors * kLanes + column];
      }
    }
#pragma unroll
    for (int half = kSums / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) total[i] += total[i + half];
    }
    part[column] = total[0];
  }
}

// Allows the next kernel of the stream to start before this one ends.
__device__ __forceinline__ void let_the_next_kernel_start() { hopper::allow_next_kernel(); }

inline bool has_parts(const NormBackward& params) {
  return params.weight_parts != nullptr || params.bias_parts != nullptr;
}

// Whether kLanes values can be loaded at a time. Null counts as aligned.
template <typename T, int kLanes>
bool aligned(const NormBackward& params) {
  return params.columns % kLanes == 0 && is_aligned<T, kLanes>(params.grad_output) &&
         is_aligned<T, kLanes>(params.input) && is_aligned<T, kLanes>(params.weight) &&
         is_aligned<T, kLanes>(params.grad_input);
}

}  // namespace
}  // namespace tch_extension::norm
