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

// How many times 16 bytes of a row a thread has in the ring buffer.
template <typename T, typename S>
constexpr int kPiecesOfSum = kVectorsOfThread<T> * (1 + 2 * StreamVector<T, S>::kPieces);

template <typename Norm, typename T, typename S, Team kTeam, bool kParameters, bool kDrops>
__global__ void __launch_bounds__(kMostThreads, 1) add_backward(NormAddBackward params) {
  using C = Compute<T>;
  using Stream = StreamVector<T, S>;
  constexpr int kLanes = kLanesOf16Bytes<T>, kVectors = kVectorsOfThread<T>;
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

  // A thread's places in the ring buffer: for each row its vectors of h, of dy and of h's gradient.
  const int next_piece = blockDim.x * 16;
  const int of_stream = kVectors * Stream::kPieces * next_piece, of_output = kVectors * next_piece;
  const int next_row = kPiecesOfSum<T, S> * next_piece, end_of_ring = stages * next_row;
  unsigned char* mine = ring + threadIdx.x * 16;
  auto copy_row = [&](int64_t row, int at) {
    const bool is_row = row < params.rows;
    // Missing columns and rows are filled with zeros, which add nothing to any sum.
    auto copy = [&](const void* array, int64_t first, int bytes_of_value, int piece, int to,
                    bool there) {
      const char* from = static_cast<const char*>(array);
      start_copy(mine + to, there ? from + first * bytes_of_value + piece * 16 : from,
                 there ? 16 : 0);
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const bool there = is_row && is_there(v);
      const int64_t first = row * params.columns + column(v);
#pragma unroll
      for (int piece = 0; piece < Stream::kPieces; ++piece) {
        const int to = at + (v * Stream::kPieces + piece) * next_piece;
        copy(params.sum, first, sizeof(S), piece, to, there);
        if (has_grad_sum)
          copy(params.grad_sum, first, sizeof(S), piece, to + of_stream + of_output, there);
      }
      copy(params.grad_output, first, sizeof(T), 0, at + of_stream + v * next_piece, there);
    }
    end_of_copies_of_a_row();
  };
  auto read_stream = [&](int v, int at) {
    Stream vector;
#pragma unroll
    for (int piece = 0; piece < Stream::kPieces; ++piece) {
      const void* from = mine + at + (v * Stream::kPieces + piece) * next_piece;
      vector.piece[piece] = load_vector<S, Stream::kLanesOfPiece>(from, 0);
    }
    return vector.values();
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
    if (is_there(v)) weight[v] = stream_values_or<T, S>(params.weight, column(v), C(1));
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
      normal[v] = read_stream(v, at);
      grad[v] =
          unpack<T, kLanes>(load_vector<T, kLanes>(mine + at + of_stream + v * next_piece, 0));
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
      if (has_grad_sum) of_sum = read_stream(v, at + of_stream + of_output);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C of_norm = input_gradient<Norm>(moments.second, grad[v].lane[lane], mean_grad,
                                               normal[v].lane[lane], mean_product);
        of_sum.lane[lane] = has_grad_sum ? of_sum.lane[lane] + of_norm : of_norm;
      }
      if (params.grad_residual != nullptr)
        Stream::of(of_sum).store(params.grad_residual, row_at + column(v));
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
  const int bytes = params.plan.stages * kPiecesOfSum<T, S> * 16 * params.plan.threads;
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
