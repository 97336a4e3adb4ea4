// The backward pass that loads rows straight into registers, for GPUs with little shared memory.
// Elsewhere backward_ring.h is faster.
#pragma once

#include "backward.h"
#include "kernels.h"

namespace tch_extension::norm {
namespace {

template <typename Norm, typename T, int kLanes, bool kWithinWarp>
__global__ void __launch_bounds__(kMostThreads) backward_in_registers(NormBackward params) {
  using C = Compute<T>;
  constexpr int kVectors = kBackwardValues<T> / kLanes;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  let_the_next_kernel_start();
  int phase = 0;
  const int team = params.plan.team;
  const int teams = teams_of_block(team);
  const int thread = thread_of_team(team);
  const int vectors = static_cast<int>(params.columns / kLanes);
  const bool has_x = has_moments<Norm>(params);
  const C inverse = C(1) / static_cast<C>(params.columns);

  C weight_sums[kVectors][kLanes], bias_sums[kVectors][kLanes];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) weight_sums[v][lane] = bias_sums[v][lane] = C(0);
  }
  Values<T, kLanes> weight[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int index = v * team + thread;
    if (index < vectors) {
      weight[v] = load_or<T, kLanes>(params.weight, static_cast<int64_t>(index) * kLanes, C(1));
    }
  }

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * teams; first < params.rows;
       first += static_cast<int64_t>(gridDim.x) * teams) {
    const int64_t row = first + team_of_block(team);
    const int64_t at = row * params.columns;
    const int mine = row < params.rows ? vectors : 0;
    Pair<C> moments = {C(0), C(0)};
    if (row < params.rows) moments = kept_moments<Norm, C>(params, row);
    const C rstd = moments.second;

    // All loads are issued first, with nothing in between that waits for one of them, because the
    // number of loads in flight decides the speed. Then x̂ replaces x, and the gradient times the
    // weight replaces the gradient.
    Vector<T, kLanes> stored_grad[kVectors], stored_x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine)
        stored_grad[v] = load_vector<T, kLanes>(params.grad_output, at + index * kLanes);
    }
    if (has_x) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int index = v * team + thread;
        if (index < mine) stored_x[v] = load_vector<T, kLanes>(params.input, at + index * kLanes);
      }
    }
    Values<T, kLanes> normal[kVectors], grad[kVectors];
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine) {
        grad[v] = unpack<T, kLanes>(stored_grad[v]);
        if (has_x) normal[v] = unpack<T, kLanes>(stored_x[v]);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          normal[v].lane[lane] =
              has_x ? normal_of<Norm>(normal[v].lane[lane], moments.first, rstd) : C(0);
          weight_sums[v][lane] += grad[v].lane[lane] * normal[v].lane[lane];
          bias_sums[v][lane] += grad[v].lane[lane];
          grad[v].lane[lane] *= weight[v].lane[lane];
          sum.first += grad[v].lane[lane];
          sum.second += grad[v].lane[lane] * normal[v].lane[lane];
        }
      }
    }
    if (params.grad_input == nullptr) continue;
    sum = team_sum<kWithinWarp>(sum, team, buffer, phase);
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          grad[v].lane[lane] = input_gradient<Norm>(rstd, grad[v].lane[lane], mean_grad,
                                                    normal[v].lane[lane], mean_product);
        }
        store_values<T, kLanes>(params.grad_input, at + static_cast<int64_t>(index) * kLanes,
                                grad[v]);
      }
    }
  }

  __shared__ __align__(16) C sums[kMostThreads * kBackwardValues<T>];
  const int64_t from = blockIdx.x * params.columns;
  const int columns = static_cast<int>(params.columns);
  auto index = [&](int v) { return v * team + thread; };
  auto write = [&](auto& of_thread, void* parts) {
    if (parts == nullptr) return;
    write_block_part<false>(of_thread, static_cast<C*>(parts) + from, columns, team, sums, index);
  };
  write(weight_sums, params.weight_parts);
  write(bias_sums, params.bias_parts);
}

template <typename Norm, typename T, int kLanes>
bool start(const NormBackward& params, cudaStream_t stream) {
  const NormPlan& plan = params.plan;
  if (!fits_a_block(plan) || params.columns > plan.team * int64_t{kBackwardValues<T>} ||
      !aligned<T, kLanes>(params)) {
    return false;
  }
  if (params.grad_input == nullptr && !has_parts(params)) return true;
  // Each block writes one part.
  const unsigned int blocks = static_cast<unsigned int>(params.parts);
  auto start_kernel = [&](auto* kernel) { kernel<<<blocks, plan.threads, 0, stream>>>(params); };
  plan.team <= kWarp ? start_kernel(backward_in_registers<Norm, T, kLanes, true>)
                     : start_kernel(backward_in_registers<Norm, T, kLanes, false>);
  return true;
}

}  // namespace

template <typename Norm>
bool start_backward_registers(const NormBackward& params, cudaStream_t stream) {
  return with_lanes(params, [&](auto type, auto lanes) {
    return start<Norm, typename decltype(type)::type, lanes()>(params, stream);
  });
}

}  // namespace tch_extension::norm
