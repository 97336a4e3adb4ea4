// The backward pass of rows of an odd length, in arrays that begin at multiples of 16 bytes. The
// distance of a row's beginning from the multiple of 16 bytes below it (the lead) repeats every few
// rows. A team only has rows with the same lead, so that a thread's 16 bytes are the same columns
// in each of them, and nothing has to be shifted. There is a ring buffer of rows as in
// backward_ring.h.
#pragma once

#include "kernels.h"
#include "ring.h"

namespace tch_extension::norm {
namespace {

// The number of columns that a row may have beyond its team's vectors (the rest): one for each lane
// of the team's last warp. Otherwise 1025 columns would need twice the threads of 1024, half of
// them idle. src/ops/norm/plan.rs has the same number.
constexpr int kMostRest = kWarp;

// A row's lead in elements: the number of columns of the previous row in its first 16 bytes.
template <typename T>
__device__ __forceinline__ int lead_of(int64_t row, int64_t columns) {
  return static_cast<int>(row * columns) & (kLanesOf16Bytes<T> - 1);
}

// The columns that a thread has in each of its rows.
template <typename T>
struct Place {
  static constexpr int kLanes = kLanesOf16Bytes<T>;
  // The column of the thread's first vector. It is negative if the previous row ends in that
  // vector.
  int first;
  int step;     // columns to the thread's next vector
  int columns;  // of the row, without the rest

  __device__ __forceinline__ int column(int v) const { return first + v * step; }
  __device__ __forceinline__ bool is_there(int v) const { return column(v) < columns; }
  __device__ __forceinline__ bool is_whole(int v) const {
    return column(v) >= 0 && column(v) + kLanes <= columns;
  }
  __device__ __forceinline__ bool has(int v, int lane) const {
    return column(v) + lane >= 0 && column(v) + lane < columns;
  }
  // The number of bytes to read. None are past the row's end, which may be the end of the array.
  __device__ __forceinline__ int bytes(int v) const {
    const int left = columns - column(v);
    return (left < 0 ? 0 : left < kLanes ? left : kLanes) * static_cast<int>(sizeof(T));
  }
};

// Adds up the teams' sums and writes the block's part. In the buffer each team has `step` values;
// its sums begin after the first `lead` of them.
template <typename T, typename C>
__device__ __forceinline__ void add_teams_up(const C* buffer, int step, int64_t first_row,
                                             int columns, int teams, C* part) {
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    C total(0);
#pragma unroll 4
    for (int team = 0; team < teams; ++team) {
      total += buffer[team * step + lead_of<T>(first_row + team, columns) + column];
    }
    part[column] = total;
  }
}

template <typename Norm, typename T>
__global__ void __launch_bounds__(kMostThreads, 1) backward_in_place(NormBackward params) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>, kBytes = 16, kVectors = kVectorsOfThread<T>;
  extern __shared__ __align__(16) unsigned char ring[];
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  let_the_next_kernel_start();
  int phase = 0;
  const int team = params.plan.team, stages = params.plan.stages;
  const int thread = thread_of_team(team), teams = teams_of_block(team);
  const int64_t first_of_block = static_cast<int64_t>(blockIdx.x) * teams;
  const int64_t first_row = first_of_block + team_of_block(team);
  const int64_t step = static_cast<int64_t>(gridDim.x) * teams;
  const int columns = static_cast<int>(params.columns);
  const int lead = lead_of<T>(first_row, columns);
  const int room = team * kBackwardValues<T> - lead;
  const Place<T> place{thread * kLanes - lead, team * kLanes, columns < room ? columns : room};
  // The rest belongs to the team's last warp.
  const int lane_of_rest = thread - (team - kWarp);
  const int column_of_rest = place.columns + lane_of_rest;
  const bool has_rest = lane_of_rest >= 0 && column_of_rest < columns;

  const int next_vector = blockDim.x * kBytes, next_array = kVectors * next_vector;
  const int next_row = 2 * next_array, end_of_ring = stages * next_row;
  unsigned char* mine = ring + threadIdx.x * kBytes;
  const T* x = static_cast<const T*>(params.input);
  const T* dy = static_cast<const T*>(params.grad_output);
  auto copy_row = [&](int64_t row, int at) {
    const bool is_row = row < params.rows;
    const int64_t begin = row * columns;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int bytes = is_row ? place.bytes(v) : 0;
      // The address must be valid even if no bytes are read.
      const int64_t from = bytes > 0 ? begin + place.column(v) : 0;
      start_copy(mine + at + v * next_vector, x + from, bytes);
      start_copy(mine + at + next_array + v * next_vector, dy + from, bytes);
    }
    end_of_copies_of_a_row();
  };
  auto read = [&](int v, int at) { return unpack<T>(load_words(mine + at + v * next_vector)); };
  // What a row needs and the ring buffer does not have.
  struct Ahead {
    Pair<C> moments;
    T x, dy;
  };
  auto load_ahead = [&](int64_t row) {
    Ahead ahead = {{C(0), C(0)}, T(0.f), T(0.f)};
    if (row < params.rows) {
      ahead.moments = kept_moments<Norm, C>(params, row);
      if (has_rest) {
        ahead.x = x[row * columns + column_of_rest];
        ahead.dy = dy[row * columns + column_of_rest];
      }
    }
    return ahead;
  };

  for (int stage = 0; stage < stages - 1; ++stage)
    copy_row(first_row + stage * step, stage * next_row);
  Ahead next = load_ahead(first_row);
  const T* weights = static_cast<const T*>(params.weight);
  Values<T, kLanes> weight[kVectors];
  C weight_sums[kVectors][kLanes], bias_sums[kVectors][kLanes];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      weight_sums[v][lane] = bias_sums[v][lane] = C(0);
      const bool is_loaded = weights != nullptr && place.has(v, lane);
      weight[v].lane[lane] = is_loaded ? static_cast<C>(weights[place.column(v) + lane]) : C(1);
    }
  }
  C rest_weight(1), rest_weight_sum(0), rest_bias_sum(0);
  if (has_rest && weights != nullptr) rest_weight = static_cast<C>(weights[column_of_rest]);

  const C inverse = C(1) / static_cast<C>(columns);
  int at = 0;
  for (int64_t row = first_row; row - team_of_block(team) < params.rows; row += step) {
    const Ahead now = next;
    const Pair<C> moments = now.moments;
    next = load_ahead(row + step);
    // The copy replaces the previous row, which has been read.
    copy_row(row + (stages - 1) * step, at == 0 ? end_of_ring - next_row : at - next_row);
    wait_for_all_but(stages - 1);

    // x̂, and the gradient times the weight.
    Values<T, kLanes> normal[kVectors], grad[kVectors];
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      normal[v] = read(v, at);
      grad[v] = read(v, at + next_array);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        normal[v].lane[lane] = normal_of<Norm>(normal[v].lane[lane], moments.first, moments.second);
      }
      if (!place.is_whole(v)) {
        // These lanes belong to another row, or to none.
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          if (!place.has(v, lane)) normal[v].lane[lane] = grad[v].lane[lane] = C(0);
        }
      }
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        weight_sums[v][lane] += grad[v].lane[lane] * normal[v].lane[lane];
        bias_sums[v][lane] += grad[v].lane[lane];
        grad[v].lane[lane] *= weight[v].lane[lane];
        sum.first += grad[v].lane[lane];
        sum.second += grad[v].lane[lane] * normal[v].lane[lane];
      }
    }
    const C rest_normal =
        has_rest ? normal_of<Norm>(static_cast<C>(now.x), moments.first, moments.second) : C(0);
    C rest_grad = static_cast<C>(now.dy);
    rest_weight_sum += rest_grad * rest_normal;
    rest_bias_sum += rest_grad;
    rest_grad *= rest_weight;
    sum.first += rest_grad;
    sum.second += rest_grad * rest_normal;
    at = at + next_row == end_of_ring ? 0 : at + next_row;

    sum = team_sum<false>(sum, team, buffer, phase);
    if (params.grad_input == nullptr || row >= params.rows) continue;
    const C mean_grad = sum.first * inverse, mean_product = sum.second * inverse;
    T* dx = static_cast<T*>(params.grad_input) + row * columns;
    auto gradient = [&](C grad, C normal) {
      return input_gradient<Norm>(moments.second, grad, mean_grad, normal, mean_product);
    };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        grad[v].lane[lane] = gradient(grad[v].lane[lane], normal[v].lane[lane]);
      }
      if (place.is_whole(v)) {
        store_whole(dx + place.column(v), pack<T>(grad[v]));
      } else if (place.is_there(v)) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          if (place.has(v, lane)) dx[place.column(v) + lane] = static_cast<T>(grad[v].lane[lane]);
        }
      }
    }
    if (has_rest) dx[column_of_rest] = static_cast<T>(gradient(rest_grad, rest_normal));
  }

  wait_for_all_but(0);
  auto* sums = reinterpret_cast<C*>(ring);
  const int sums_of_team = team * kBackwardValues<T> + kMostRest;
  auto write = [&](const auto& of_thread, C of_rest, void* parts) {
    if (parts == nullptr) return;
    __syncthreads();
    C* to = sums + team_of_block(team) * sums_of_team;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      store_sums<C, kLanes>(to + (v * team + thread) * kLanes, of_thread[v]);
    if (lane_of_rest >= 0) to[team * kBackwardValues<T> + lane_of_rest] = of_rest;
    __syncthreads();
    C* part = static_cast<C*>(parts) + blockIdx.x * params.columns;
    add_teams_up<T>(sums, sums_of_team, first_of_block, columns, teams, part);
  };
  write(weight_sums, rest_weight_sum, params.weight_parts);
  write(bias_sums, rest_bias_sum, params.bias_parts);
}

template <typename T>
bool fits(const NormBackward& params) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const NormPlan& plan = params.plan;
  if (!fits_a_block(plan) || plan.team < 2 * kWarp) return false;
  if (plan.stages < 2 || plan.stages > 3 || plan.cluster != 1) return false;
  if (!is_aligned<T, kLanes>(params.input) || !is_aligned<T, kLanes>(params.grad_output) ||
      !is_aligned<T, kLanes>(params.grad_input)) {
    return false;
  }
  // All rows of a team must have the same lead.
  const int64_t step = params.parts * (plan.threads / plan.team);
  if (step < params.rows && step * params.columns % kLanes != 0) return false;
  return params.columns + kLanes - 1 <= plan.team * int64_t{kBackwardValues<T>} + kMostRest;
}

template <typename Norm, typename T>
void start(const NormBackward& params, cudaStream_t stream) {
  constexpr auto kKernel = backward_in_place<Norm, T>;
  const int bytes = bytes_of_ring<T>(params.plan);
  // The caller checks for errors after the launch.
  if (allow_shared_memory<kKernel>(bytes) != cudaSuccess) return;
  kKernel<<<static_cast<unsigned int>(params.parts), params.plan.threads, bytes, stream>>>(params);
}

}  // namespace

template <typename Norm>
bool start_backward_in_place(const NormBackward& params, cudaStream_t stream) {
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = fits<T>(params);
    if (planned) start<Norm, T>(params, stream);
  });
  return planned;
}

}  // namespace tch_extension::norm
