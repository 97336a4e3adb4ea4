// The backward pass of rows that do not fit any block's registers: one kernel reads them again for
// each pass, and another adds up the sums over rows.
#pragma once

#include "backward.h"
#include "kernels.h"

namespace tch_extension::norm {
namespace {

// The terms of one vector of a row: x̂, and the gradient times the weight.
template <typename T, int kLanes>
struct Terms {
  Values<T, kLanes> normal, grad;
};

template <typename Norm, typename T, int kLanes>
__device__ __forceinline__ Terms<T, kLanes> load_terms(const NormBackward& params, int64_t at,
                                                       int64_t column, Pair<Compute<T>> moments) {
  Terms<T, kLanes> terms;
  terms.normal = load_values<T, kLanes>(params.input, at + column);
  terms.grad = load_values<T, kLanes>(params.grad_output, at + column);
  const auto weight = load_or<T, kLanes>(params.weight, column, Compute<T>(1));
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    terms.normal.lane[lane] =
        normal_of<Norm>(terms.normal.lane[lane], moments.first, moments.second);
    terms.grad.lane[lane] *= weight.lane[lane];
  }
  return terms;
}

// The input's gradient for long rows. The whole block is one team.
template <typename Norm, typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads) backward_in_passes(NormBackward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  let_the_next_kernel_start();
  int phase = 0;
  const int team = blockDim.x;
  const int64_t vectors = params.columns / kLanes;

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t at = row * params.columns;
    const Pair<C> moments = kept_moments<Norm, C>(params, row);
    Pair<C> by_lane[kLanes] = {};
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto terms = load_terms<Norm, T, kLanes>(params, at, index * kLanes, moments);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        by_lane[lane].first += terms.grad.lane[lane];
        by_lane[lane].second += terms.grad.lane[lane] * terms.normal.lane[lane];
      }
    }
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      sum.first += by_lane[lane].first;
      sum.second += by_lane[lane].second;
    }
    sum = team_sum<false>(sum, team, buffer, phase);
    const C mean_grad = sum.first / static_cast<C>(params.columns);
    const C mean_product = sum.second / static_cast<C>(params.columns);
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      auto terms = load_terms<Norm, T, kLanes>(params, at, index * kLanes, moments);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        terms.grad.lane[lane] =
            input_gradient<Norm>(moments.second, terms.grad.lane[lane], mean_grad,
                                 terms.normal.lane[lane], mean_product);
      }
      store_values<T, kLanes>(params.grad_input, at + index * kLanes, terms.grad);
    }
  }
}

// The sums over rows, for long rows: each thread has kLanes columns, and blockIdx.y is the index of
// the part.
template <typename Norm, typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) backward_parts(NormBackward params) {
  using C = Compute<T>;
  const int64_t rows_of_part = (params.rows + params.parts - 1) / params.parts;
  const int64_t begin = blockIdx.y * rows_of_part;
  const int64_t end = begin + rows_of_part < params.rows ? begin + rows_of_part : params.rows;
  const int64_t vectors = params.columns / kLanes;
  for (int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int64_t column = index * kLanes;
    C weight_sums[kLanes] = {}, bias_sums[kLanes] = {};
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * params.columns + column;
      const auto grad = load_values<T, kLanes>(params.grad_output, at);
      if (params.weight_parts != nullptr) {
        const auto x = load_values<T, kLanes>(params.input, at);
        const Pair<C> moments = kept_moments<Norm, C>(params, row);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          weight_sums[lane] +=
              grad.lane[lane] * normal_of<Norm>(x.lane[lane], moments.first, moments.second);
        }
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) bias_sums[lane] += grad.lane[lane];
    }
    const int64_t to = blockIdx.y * params.columns + column;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (params.weight_parts != nullptr)
        static_cast<C*>(params.weight_parts)[to + lane] = weight_sums[lane];
      if (params.bias_parts != nullptr)
        static_cast<C*>(params.bias_parts)[to + lane] = bias_sums[lane];
    }
  }
}

template <typename Norm, typename T, int kLanes>
bool start(const NormBackward& params, cudaStream_t stream) {
  const NormPlan& plan = params.plan;
  if (!fits_a_block(plan) || plan.team != plan.threads || !aligned<T, kLanes>(params)) return false;
  if (params.grad_input != nullptr && params.rows > 0) {
    const unsigned int blocks = at_most(params.rows, INT32_MAX);
    backward_in_passes<Norm, T, kLanes><<<blocks, plan.threads, 0, stream>>>(params);
  }
  if (has_parts(params)) {
    const int64_t vectors = params.columns / kLanes;
    const dim3 blocks(at_most((vectors + kThreads - 1) / kThreads, INT32_MAX),
                      static_cast<unsigned int>(params.parts));
    backward_parts<Norm, T, kLanes><<<blocks, kThreads, 0, stream>>>(params);
  }
  return true;
}

}  // namespace

template <typename Norm>
bool start_backward_passes(const NormBackward& params, cudaStream_t stream) {
  return with_lanes(params, [&](auto type, auto lanes) {
    return start<Norm, typename decltype(type)::type, lanes()>(params, stream);
  });
}

}  // namespace tch_extension::norm
