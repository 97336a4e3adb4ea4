// The backward pass for few rows, in one kernel: some of its blocks compute rows of dx while others
// compute columns of dw and db. The latter read x and dy again: partial sums would be as many
// bytes, and a second kernel would take longer than all of this.
#pragma once

#include "backward.h"
#include "kernels.h"
#include "shifted.h"

namespace tch_extension::norm {
namespace {

// The gradients of weight and bias in `count` columns from `first` on. `count` is a power of two,
// and the threads are divided evenly between the columns.
template <typename Norm, typename T>
__device__ __forceinline__ void sum_columns(const NormBackward& params, int64_t first, int count) {
  using C = Compute<T>;
  constexpr int kRows = 8;  // rows that a thread has in flight
  __shared__ Pair<C> sums[kMostThreads];
  const int of_block = threadIdx.x & (count - 1), group = threadIdx.x >> (__ffs(count) - 1);
  const int groups = kMostThreads >> (__ffs(count) - 1);
  const int64_t column = first + of_block;
  const bool is_column = column < params.columns;
  Pair<C> sum = {C(0), C(0)};
  for (int64_t begin = group; begin < params.rows; begin += kRows * groups) {
    T grad[kRows], x[kRows];
    Pair<C> moments[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      // Past the end, the last row is loaded again and not counted, so that no load waits for a
      // branch.
      const int64_t asked = begin + i * groups;
      const int64_t row = asked < params.rows ? asked : params.rows - 1;
      const int64_t at = row * params.columns + (is_column ? column : first);
      grad[i] = static_cast<const T*>(params.grad_output)[at];
      x[i] = static_cast<const T*>(params.input)[at];
      moments[i] = kept_moments<Norm, C>(params, row);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (begin + i * groups >= params.rows) break;
      const C value = static_cast<C>(grad[i]);
      // This adds zero if there are no moments, which only the weight's gradient needs.
      sum.first +=
          value * normal_of<Norm>(static_cast<C>(x[i]), moments[i].first, moments[i].second);
      sum.second += value;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  // The first group of threads finishes the weight's gradient, the second the bias'.
  void* result = group == 0 ? params.grad_weight : params.grad_bias;
  if (group < 2 && is_column && result != nullptr) {
    // Eight partial sums, then a tree of them: shorter chains of additions lose less precision.
    constexpr int kSums = 8;
    C total[kSums] = {};
    for (int begin = 0; begin < groups; begin += kSums) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const Pair<C> of_group = sums[(begin + i) * count + of_block];
        total[i] += group == 0 ? of_group.first : of_group.second;
      }
    }
#pragma unroll
    for (int half = kSums / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) total[i] += total[i + half];
    }
    static_cast<T*>(result)[column] = static_cast<T>(total[0]);
  }
}

// The input's gradient, with one team per row. Rows may begin at any address.
template <typename Norm, typename T>
__device__ __forceinline__ void do_rows(const NormBackward& params, int64_t block) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>, kVectors = kBackwardValues<T> / kLanes;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int phase = 0;
  const int team = params.plan.team;
  const int64_t row = block * teams_of_block(team) + team_of_block(team);
  const bool is_row = row < params.rows;
  const int all = static_cast<int>(params.columns), columns = is_row ? all : 0;
  const int64_t at = is_row ? row * params.columns : 0;
  const Group group(team, (all + kLanes - 1) / kLanes);

  Words x[kVectors], dy[kVectors];
  const int64_t elements = params.rows * params.columns;
  auto load = [&](const void* array, Words(&to)[kVectors]) {
    const T* values = static_cast<const T*>(array);
    load_shifted<T>(values + at, values + elements, columns, group, to);
  };
  load(params.input, x);
  load(params.grad_output, dy);
  const Parameter<T> weight(params.weight, all);
  Words stored_weight = weight.load(int64_t{group.index(0)} * kLanes);
  const Pair<C> moments = is_row ? kept_moments<Norm, C>(params, row) : Pair<C>{C(0), C(0)};

  Values<T, kLanes> normal[kVectors], grad[kVectors];
  Pair<C> sum = {C(0), C(0)};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v >= group.vectors) break;
    const int count = columns - group.index(v) * kLanes;
    if (v > 0) stored_weight = weight.load(int64_t{group.index(v)} * kLanes);
    const auto w = weight.values(stored_weight, C(1));
    normal[v] = unpack<T>(x[v]);
    grad[v] = unpack<T>(dy[v]);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      // Lanes past the row's end hold arbitrary values.
      const bool there = lane < count;
      normal[v].lane[lane] =
          there ? normal_of<Norm>(normal[v].lane[lane], moments.first, moments.second) : C(0);
      grad[v].lane[lane] = there ? grad[v].lane[lane] * w.lane[lane] : C(0);
      sum.first += grad[v].lane[lane];
      sum.second += grad[v].lane[lane] * normal[v].lane[lane];
    }
  }
  sum = team <= kWarp ? team_sum<true>(sum, team, buffer, phase)
                      : team_sum<false>(sum, team, buffer, phase);
  const C inverse = C(1) / static_cast<C>(params.columns);
  const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (v >= group.vectors) break;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      grad[v].lane[lane] = input_gradient<Norm>(moments.second, grad[v].lane[lane], mean_grad,
                                                normal[v].lane[lane], mean_product);
    }
    x[v] = pack<T>(grad[v]);
  }
  store_shifted<T>(static_cast<T*>(params.grad_input) + at, columns, group, x);
}

// The first `row_blocks` blocks compute rows; the remaining blocks compute columns. kBlocks is the
// number of blocks per multiprocessor: if it is one, a thread has registers for more loads in
// flight.
template <typename Norm, typename T, int kBlocks>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    backward_few(NormBackward params, unsigned int row_blocks, int columns_of_block) {
  if (blockIdx.x < row_blocks) return do_rows<Norm, T>(params, blockIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.x - row_blocks) * columns_of_block;
  sum_columns<Norm, T>(params, first, columns_of_block);
}

// Whether the kernel also computes the input's gradient.
bool has_rows(const NormBackward& params) {
  return params.plan.way == NormWay::Few && params.grad_input != nullptr;
}

template <typename T>
bool fits(const NormBackward& params) {
  const NormPlan& plan = params.plan;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  if (!fits_a_block(plan) || plan.cluster != 1) return false;
  if (params.columns > int64_t{INT32_MAX} * 8) return false;
  if (!has_rows(params)) return true;
  const int64_t all = (params.columns + kLanes - 1) / kLanes;
  return plan.threads == kMostThreads && all * kLanes <= int64_t{plan.team} * kBackwardValues<T>;
}

// The number of multiprocessors of an H200. On another GPU the choice is correct, too, but less
// good.
constexpr int kProcessors = 132;

// The number of columns per block. It is small, so that all rows are in flight at a time, and
// larger if not all blocks could run at the same time otherwise.
int columns_of_block(const NormBackward& params, unsigned int row_blocks) {
  constexpr int kLeast = 16, kMost = 64, kRowsOfThread = 8;
  int columns = kLeast;
  while (columns < kMost && params.rows * 2 * columns <= kRowsOfThread * kMostThreads &&
         row_blocks + params.columns / columns > kProcessors) {
    columns *= 2;
  }
  return columns;
}

}  // namespace

template <typename Norm>
bool start_backward_few(const NormBackward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = fits<T>(params);
    if (!planned) return;
    const bool columns = params.grad_weight != nullptr || params.grad_bias != nullptr;
    const unsigned int row_blocks =
        has_rows(params) ? blocks_of_teams(params.rows, params.plan) : 0;
    const int of_block = columns_of_block(params, row_blocks);
    const unsigned int column_blocks =
        columns ? static_cast<unsigned int>((params.columns + of_block - 1) / of_block) : 0;
    if (row_blocks + column_blocks == 0) return;
    const unsigned int blocks = row_blocks + column_blocks;
    // For doubles, a multiprocessor never runs two blocks at a time.
    constexpr int kTwo = sizeof(T) == 8 ? 1 : 2;
    const auto kernel =
        blocks <= kProcessors ? backward_few<Norm, T, 1> : backward_few<Norm, T, kTwo>;
    kernel<<<blocks, kMostThreads, 0, stream>>>(params, row_blocks, of_block);
  });
  return planned;
}

}  // namespace tch_extension::norm
