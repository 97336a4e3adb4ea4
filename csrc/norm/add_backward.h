// The backward pass of rows that are sums: dh = (the norm's gradient from dy) + (the incoming
// gradient of h), which is the gradient of the residual and, through dropout, of the branch; and
// the sums over rows for weight and bias. Memory is touched once. As in backward_ring.h, blocks are
// persistent, and rows of h, of dy and of h's gradient pass through a ring buffer in shared memory,
// in which each thread reads only what it copied itself.
#pragma once

#include "add.h"
#include "add_kernels.h"
#include "cluster.h"
#include "philox.h"
#include "ring.h"

namespace tch_extension::norm {
namespace {

// A thread's vectors hold 16 bytes of the stream, so that adjacent threads read and write adjacent
// 16 bytes of it. Those of the branch then have 8 bytes if only the stream is of kind float. With
// 16 bytes of the branch, each half of 32 bytes of the stream was an access of its own, which took
// 1.3 times as long.
template <typename S>
constexpr int kLanesOfSum = kLanesOf16Bytes<S>;

// How many bytes of a row a thread has in the ring buffer.
template <typename T, typename S>
constexpr int kBytesInRing = kBackwardValues<T> * static_cast<int>(sizeof(T) + 2 * sizeof(S));

template <int kBytes>
__device__ __forceinline__ void start_copy_of(void* to, const void* from, bool there) {
  static_assert(kBytes == 8 || kBytes == 16, "the copies that there are");
  if constexpr (kBytes == 16) {
    start_copy(to, from, there ? 16 : 0);
  } else {
    hopper::copy_8_bytes_async(to, from, there);
  }
}

template <typename Norm, typename T, typename S, Team kTeam, bool kParameters, bool kDrops>
__global__ void __launch_bounds__(kMostThreads, 1) add_backward(NormAddBackward params) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOfSum<S>, kVectors = kBackwardValues<T> / kLanes;
  constexpr int kBytesOfBranch = kLanes * sizeof(T);
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ Pair<C> buffer[kPairsOfSums<kTeam>];
  let_the_next_kernel_start();
  int phase = 0;
  const int team = params.plan.team, stages = params.plan.stages;
  const int thread = thread_of_team(team), teams = teams_of_block(team);
  const int vectors = static_cast<int>(params.columns / kLanes);
  const bool has_grad_sum = params.grad_sum != nullptr;
  auto is_there = [&](int v) { return v * team + thread < vectors; };
  auto column = [&](int v) { return int64_t{v * team + thread} * kLanes; };

  // The ring buffer: for each row the block's vectors of h, of dy and of h's gradient.
  const int threads = blockDim.x;
  const int of_stream = kVectors * threads * 16, of_branch = kVectors * threads * kBytesOfBranch;
  const int next_row = 2 * of_stream + of_branch, end_of_ring = stages * next_row;
  auto place_of_sum = [&](int v, int at) { return ring + at + (v * threads + threadIdx.x) * 16; };
  auto place_of_grad = [&](int v, int at) {
    return ring + at + of_stream + (v * threads + threadIdx.x) * kBytesOfBranch;
  };
  auto place_of_grad_sum = [&](int v, int at) {
    return place_of_sum(v, at + of_stream + of_branch);
  };
  auto copy_row = [&](int64_t row, int at) {
    const bool is_row = row < params.rows;
    // Missing columns and rows are filled with zeros, which add nothing to any sum.
    auto from = [&](const void* array, int64_t first, int bytes_of_value, bool there) {
      return static_cast<const char*>(array) + (there ? first * bytes_of_value : 0);
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool there = is_row && is_there(v);
      const int64_t first = row * params.columns + column(v);
      start_copy_of<16>(place_of_sum(v, at), from(params.sum, first, sizeof(S), there), there);
      start_copy_of<kBytesOfBranch>(place_of_grad(v, at),
                                    from(params.grad_output, first, sizeof(T), there), there);
      if (has_grad_sum) {
        start_copy_of<16>(place_of_grad_sum(v, at), from(params.grad_sum, first, sizeof(S), there),
                          there);
      }
    }
    end_of_copies_of_a_row();
  };
  auto read_stream = [&](const void* place) {
    return unpack<S, kLanes>(load_vector<S, kLanes>(place, 0));
  };
  auto moments_of = [&](int64_t row) {
    return row < params.rows ? kept_moments<Norm, C>(params, row) : Pair<C>{C(0), C(0)};
  };

  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * teams + team_of_block(team);
  const int64_t step = static_cast<int64_t>(gridDim.x) * teams;
  for (int stage = 0; stage < stages - 1; ++stage)
    copy_row(first_row + stage * step, stage * next_row);
  Pair<C> next_moments = moments_of(first_row);
  Values<S, kLanes> weight[kVectors];
  C weight_sums[kVectors][kLanes], bias_sums[kVectors][kLanes];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      weight[v].lane[lane] = weight_sums[v][lane] = bias_sums[v][lane] = C(0);
    if (is_there(v)) weight[v] = load_or<S, kLanes>(params.weight, column(v), C(1));
  }

  const C inverse = C(1) / static_cast<C>(params.columns);
  int at = 0;
  // All threads of a block do the same number of iterations, because they meet in sum_of_team.
  for (int64_t row = first_row; row - team_of_block(team) < params.rows; row += step) {
    const Pair<C> moments = next_moments;
    next_moments = moments_of(row + step);
    // The copy replaces the previous row, which this thread has read.
    copy_row(row + (stages - 1) * step, at == 0 ? end_of_ring - next_row : at - next_row);
    wait_for_all_but(stages - 1);

    // x̂, and the gradient times the weight.
    Values<S, kLanes> normal[kVectors];
    Values<T, kLanes> grad[kVectors];
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      normal[v] = read_stream(place_of_sum(v, at));
      grad[v] = unpack<T, kLanes>(load_vector<T, kLanes>(place_of_grad(v, at), 0));
      // x̂ must be zero where there are no columns, too: a huge mean would make it infinite.
      const C rstd = is_there(v) ? moments.second : C(0);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        normal[v].lane[lane] = normal_of<Norm>(normal[v].lane[lane], moments.first, rstd);
        if constexpr (kParameters) {
          weight_sums[v][lane] += grad[v].lane[lane] * normal[v].lane[lane];
          bias_sums[v][lane] += grad[v].lane[lane];
        }
        grad[v].lane[lane] *= weight[v].lane[lane];
        sum.first += grad[v].lane[lane];
        sum.second += grad[v].lane[lane] * normal[v].lane[lane];
      }
    }
    sum = sum_of_team<kTeam>(sum, params.plan, team, buffer, phase);
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
    const int64_t row_at = row * params.columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (row >= params.rows || !is_there(v)) continue;
      Values<S, kLanes> of_sum;
      if (has_grad_sum) of_sum = read_stream(place_of_grad_sum(v, at));
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C of_norm = input_gradient<Norm>(moments.second, grad[v].lane[lane], mean_grad,
                                               normal[v].lane[lane], mean_product);
        of_sum.lane[lane] = has_grad_sum ? of_sum.lane[lane] + of_norm : of_norm;
      }
      if (params.grad_residual != nullptr)
        store_values<S, kLanes>(params.grad_residual, row_at + column(v), of_sum);
      if (params.grad_input != nullptr) {
        Values<T, kLanes> of_input;
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) of_input.lane[lane] = of_sum.lane[lane];
        if constexpr (kDrops) {
          const Dropout<C> dropout(params.random, params.dropout);
          dropout.template apply<T, kLanes>(of_input, row_at + column(v));
        }
        store_values<T, kLanes>(params.grad_input, row_at + column(v), of_input);
      }
    }
    at = at + next_row == end_of_ring ? 0 : at + next_row;
  }

  if constexpr (kParameters) {
    wait_for_all_but(0);
    const int64_t from = static_cast<int64_t>(blockIdx.x) * params.columns;
    auto write = [&](auto& of_thread, void* parts) {
      if (parts == nullptr) return;
      auto place = [&](int v) { return v * team + thread; };
      write_block_part<false>(of_thread, static_cast<C*>(parts) + from,
                              static_cast<int>(params.columns), team, reinterpret_cast<C*>(ring),
                              place);
    };
    write(weight_sums, params.weight_parts);
    write(bias_sums, params.bias_parts);
  }
}

template <typename T>
bool fits_sum(const NormAddBackward& params) {
  const NormPlan& plan = params.plan;
  return params.parameter_kind == params.stream_kind && fits_a_block(plan) && plan.cluster == 1 &&
         plan.stages >= 2 && plan.stages <= 3 && params.columns % kLanesOf16Bytes<T> == 0 &&
         params.columns <= int64_t{plan.team} * kBackwardValues<T> &&
         are_aligned({params.sum, params.grad_output, params.grad_sum, params.weight,
                      params.grad_residual, params.grad_input});
}

template <typename Norm, typename T, typename S, Team kTeam, bool kParameters, bool kDrops>
void start_kernel_of_sum(const NormAddBackward& params, cudaStream_t stream) {
  constexpr auto kKernel = add_backward<Norm, T, S, kTeam, kParameters, kDrops>;
  const int bytes = params.plan.stages * kBytesInRing<T, S> * params.plan.threads;
  // The caller checks for errors after the launch.
  if (allow_shared_memory<kKernel>(bytes) != cudaSuccess) return;
  const ClusterLaunch launch(params.plan, bytes, params.parts, stream);
  cudaLaunchKernelEx(&launch.config, kKernel, params);
}

template <typename Norm, typename T, typename S, bool kParameters, bool kDrops>
void start_sum(const NormAddBackward& params, cudaStream_t stream) {
  params.plan.team <= kWarp
      ? start_kernel_of_sum<Norm, T, S, Team::kWithinWarp, kParameters, kDrops>(params, stream)
      : start_kernel_of_sum<Norm, T, S, Team::kBlock, kParameters, kDrops>(params, stream);
}

}  // namespace

template <typename Norm>
bool start_add_backward(const NormAddBackward& params, cudaStream_t stream) {
  return with_kinds_of_sum(params.kind, params.stream_kind, [&](auto type, auto stream_type) {
    using T = typename decltype(type)::type;
    using S = typename decltype(stream_type)::type;
    if (!fits_sum<T>(params)) return false;
    const bool has_parameters = params.weight_parts != nullptr || params.bias_parts != nullptr;
    // Only the branch's gradient goes through dropout.
    if (params.dropout > 0) {
      has_parameters ? start_sum<Norm, T, S, true, true>(params, stream)
                     : start_sum<Norm, T, S, false, true>(params, stream);
    } else {
      has_parameters ? start_sum<Norm, T, S, true, false>(params, stream)
                     : start_sum<Norm, T, S, false, false>(params, stream);
    }
    return true;
  });
}

}  // namespace tch_extension::norm
