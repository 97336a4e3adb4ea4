// Two kernels of the backward pass: one that loads rows straight to registers, for GPUs with little
// shared memory, and one for rows that do not fit any block's registers, which are read again for
// each pass. Most cases use backward_ring.cu instead.

#include "backward.h"

namespace tch_extension {
namespace {

template <typename T, int kLanes, bool kWithinWarp>
__global__ void __launch_bounds__(kMostThreads)
    layer_norm_backward_in_registers(LayerNormBackward params) {
  using C = Compute<T>;
  constexpr int kVectors = kBackwardValues<T> / kLanes;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  let_the_next_kernel_start();
  int turn = 0;
  const int team = params.plan.team;
  const int teams = teams_of_block(team);
  const int thread = thread_of_team(team);
  const int vectors = static_cast<int>(params.columns / kLanes);
  const bool has_moments = params.mean != nullptr;
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
    if (row < params.rows) moments = kept_moments<C>(params, row);
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
    if (has_moments) {
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
        if (has_moments) normal[v] = unpack<T, kLanes>(stored_x[v]);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          normal[v].lane[lane] = has_moments ? (normal[v].lane[lane] - moments.first) * rstd : C(0);
          weight_sums[v][lane] += grad[v].lane[lane] * normal[v].lane[lane];
          bias_sums[v][lane] += grad[v].lane[lane];
          grad[v].lane[lane] *= weight[v].lane[lane];
          sum.first += grad[v].lane[lane];
          sum.second += grad[v].lane[lane] * normal[v].lane[lane];
        }
      }
    }
    if (params.grad_input == nullptr) continue;
    sum = team_sum<kWithinWarp>(sum, team, buffer, turn);
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          grad[v].lane[lane] =
              rstd * (grad[v].lane[lane] - mean_grad - normal[v].lane[lane] * mean_product);
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

// The terms of one vector of a row: x̂, and the gradient times the weight.
template <typename T, int kLanes>
struct Terms {
  Values<T, kLanes> normal, grad;
};

template <typename T, int kLanes>
__device__ __forceinline__ Terms<T, kLanes> load_terms(const LayerNormBackward& params, int64_t at,
                                                       int64_t column, Pair<Compute<T>> moments) {
  Terms<T, kLanes> terms;
  terms.normal = load_values<T, kLanes>(params.input, at + column);
  terms.grad = load_values<T, kLanes>(params.grad_output, at + column);
  const auto weight = load_or<T, kLanes>(params.weight, column, Compute<T>(1));
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    terms.normal.lane[lane] = (terms.normal.lane[lane] - moments.first) * moments.second;
    terms.grad.lane[lane] *= weight.lane[lane];
  }
  return terms;
}

// The input's gradient for long rows. The whole block is one team.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads)
    layer_norm_backward_in_passes(LayerNormBackward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  let_the_next_kernel_start();
  int turn = 0;
  const int team = blockDim.x;
  const int64_t vectors = params.columns / kLanes;

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t at = row * params.columns;
    const Pair<C> moments = kept_moments<C>(params, row);
    Pair<C> by_lane[kLanes] = {};
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto terms = load_terms<T, kLanes>(params, at, index * kLanes, moments);
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
    sum = team_sum<false>(sum, team, buffer, turn);
    const C mean_grad = sum.first / static_cast<C>(params.columns);
    const C mean_product = sum.second / static_cast<C>(params.columns);
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      auto terms = load_terms<T, kLanes>(params, at, index * kLanes, moments);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        terms.grad.lane[lane] = moments.second * (terms.grad.lane[lane] - mean_grad -
                                                  terms.normal.lane[lane] * mean_product);
      }
      store_values<T, kLanes>(params.grad_input, at + index * kLanes, terms.grad);
    }
  }
}

// The sums over rows, for long rows: each thread has kLanes columns, and blockIdx.y is the index of
// the part.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) layer_norm_parts(LayerNormBackward params) {
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
        const Pair<C> moments = kept_moments<C>(params, row);
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          weight_sums[lane] += grad.lane[lane] * ((x.lane[lane] - moments.first) * moments.second);
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

template <typename T, int kLanes>
bool fits(const LayerNormBackward& params) {
  const LayerNormPlan& plan = params.plan;
  return params.kind == params.parameter_kind && fits_a_block(plan) && plan.cluster == 1 &&
         (plan.in_registers ? params.columns <= plan.team * int64_t{kBackwardValues<T>}
                            : plan.team == plan.threads) &&
         aligned<T, kLanes>(params);
}

template <typename T, int kLanes>
void start_in_registers(const LayerNormBackward& params, cudaStream_t stream) {
  // Each block writes one part.
  const unsigned int blocks = static_cast<unsigned int>(params.parts);
  auto start_kernel = [&](auto* kernel) {
    kernel<<<blocks, params.plan.threads, 0, stream>>>(params);
  };
  params.plan.team <= kWarp ? start_kernel(layer_norm_backward_in_registers<T, kLanes, true>)
                            : start_kernel(layer_norm_backward_in_registers<T, kLanes, false>);
}

template <typename T, int kLanes>
void start(const LayerNormBackward& params, cudaStream_t stream) {
  const bool input = params.grad_input != nullptr;
  const bool parameters = params.weight_parts != nullptr || params.bias_parts != nullptr;
  if (params.plan.in_registers) {
    if (input || parameters) start_in_registers<T, kLanes>(params, stream);
    return;
  }
  if (input && params.rows > 0) {
    const unsigned int blocks = at_most(params.rows, INT32_MAX);
    layer_norm_backward_in_passes<T, kLanes><<<blocks, params.plan.threads, 0, stream>>>(params);
  }
  if (parameters) {
    const int64_t vectors = params.columns / kLanes;
    const dim3 blocks(at_most((vectors + kThreads - 1) / kThreads, INT32_MAX),
                      static_cast<unsigned int>(params.parts));
    layer_norm_parts<T, kLanes><<<blocks, kThreads, 0, stream>>>(params);
  }
}

}  // namespace

const char* start_layer_norm_backward(const LayerNormBackward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    auto start_if_it_fits = [&](auto lanes) {
      planned = fits<T, lanes()>(params);
      if (planned) start<T, lanes()>(params, stream);
    };
    params.plan.lanes == kLanesOf16Bytes<T>
        ? start_if_it_fits(std::integral_constant<int, kLanesOf16Bytes<T>>{})
        : start_if_it_fits(std::integral_constant<int, 1>{});
  });
  return planned ? nullptr : "internal error: the plan does not fit the arrays";
}

}  // namespace tch_extension
