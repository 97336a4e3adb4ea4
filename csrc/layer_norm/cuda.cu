// A team of threads does a row. Up to a size it keeps the row in registers, so that memory is read once: a
// forward moves 2·M·N values and the parameters, a backward 3·M·N and its sums for the parameters. A team is
// a warp or a part of one, or a block; a block of small teams does several rows at a time, and its threads
// add up the sums for weight and bias over all its rows, because each has the same columns in every row.
//
// Longer rows are read again for each pass: three times in the forward, twice in the backward (mostly from
// the L2 cache), whose sums for weight and bias are then a kernel of their own.

#include <limits>
#include <type_traits>

#include "layer_norm.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/launch.h"

namespace tch_extension {
namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 512;
constexpr unsigned int kAllLanes = 0xffffffffu;

// How many of a row's values a thread keeps; src/ffi/layer_norm.rs has the same numbers. In the forward 64
// bytes of them: what is under way at a time decides the speed.
template <typename T>
constexpr int kForwardValues = 64 / sizeof(T);
// So many that the backward's four arrays of them, of the compute kind, fit in the 128 registers of a thread
// in the largest block.
template <typename T>
constexpr int kBackwardValues = 64 / sizeof(Compute<T>);

template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_or(const void* pointer, int64_t at, Compute<T> otherwise) {
  if (pointer != nullptr) return load_values<T, kLanes>(pointer, at);
  Values<T, kLanes> values;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] = otherwise;
  return values;
}

template <typename C>
struct Pair {
  C first, second;
};

// Sums over the team's threads, the same bits in each. `buffer` has room for two sets of sums, which take
// turns: a thread that writes one has passed the barrier behind the other, and so has everyone who read it.
// Every thread of the block has to come here.
template <bool kWithinWarp, typename C>
__device__ __forceinline__ Pair<C> team_sum(Pair<C> sum, int team, Pair<C>* buffer, int& turn) {
  const int lanes = kWithinWarp ? team : kWarp;
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sum.first += __shfl_xor_sync(kAllLanes, sum.first, offset);
    sum.second += __shfl_xor_sync(kAllLanes, sum.second, offset);
  }
  if constexpr (kWithinWarp) return sum;

  Pair<C>* sums = buffer + turn * (kMostThreads / kWarp);
  turn = 1 - turn;
  const int warp = threadIdx.x / kWarp;
  if (threadIdx.x % kWarp == 0) sums[warp] = sum;
  __syncthreads();
  const int warps_of_team = team / kWarp;
  const int first = warp / warps_of_team * warps_of_team;
  Pair<C> total = {C(0), C(0)};
  for (int index = first; index < first + warps_of_team; ++index) {
    total.first += sums[index].first;
    total.second += sums[index].second;
  }
  return total;
}

// A power of two of at most 1 / N, so that nothing is rounded: a sum of N values times this cannot overflow
// where no value does.
template <typename C>
__device__ __forceinline__ C scale_for(int64_t columns) {
  const int exponent = columns > 1 ? 64 - __clzll(columns - 1) : 0;
  return ldexp(C(1), -exponent);
}

// A row of equal values has exactly these for its mean, unless its sum is so long that it rounds by more than
// this. Any other row loses nothing if its deviations are counted from its first value where that is as near.
template <typename T>
__device__ __forceinline__ Compute<T> pivot(Compute<T> mean, const void* input, int64_t row_at) {
  using C = Compute<T>;
  const C first = static_cast<C>(static_cast<const T*>(input)[row_at]);
  const C distance = mean < first ? first - mean : mean - first;
  const C size = first < C(0) ? -first : first;
  return distance <= C(32) * std::numeric_limits<C>::epsilon() * size ? first : mean;
}

// The rounded mean (or what is as near), what is missing of it, and 1 / √(variance + eps).
template <typename C>
struct Moments {
  C mean, correction, rstd;
};

// From the scaled sum of x - mean, and the sum of its squares.
template <typename C>
__device__ __forceinline__ Moments<C> moments_from(C mean, Pair<C> sums, C scale, int64_t columns,
                                                   double eps) {
  const C correction = sums.first / (static_cast<C>(columns) * scale);
  const C mean_square = sums.second / static_cast<C>(columns);
  // Where the squares are beyond the largest value, the correction's may be, too, and their difference NaN.
  const C variance = isinf(mean_square) ? mean_square : mean_square - correction * correction;
  // Not max, which would drop NaN.
  const C positive = variance < C(0) ? C(0) : variance;
  return {mean, correction, C(1) / sqrt(positive + static_cast<C>(eps))};
}

template <typename C>
__device__ __forceinline__ void keep_moments(const LayerNormForward& params, int64_t row,
                                             const Moments<C>& moments) {
  if (params.mean != nullptr) static_cast<C*>(params.mean)[row] = moments.mean + moments.correction;
  if (params.rstd != nullptr) static_cast<C*>(params.rstd)[row] = moments.rstd;
}

template <typename T, int kLanes>
__device__ __forceinline__ void write_normal(const LayerNormForward& params, int64_t row_at, int64_t column,
                                             const Values<T, kLanes>& x, const Moments<Compute<T>>& moments) {
  const auto weight = load_or<T, kLanes>(params.weight, column, Compute<T>(1));
  const auto bias = load_or<T, kLanes>(params.bias, column, Compute<T>(0));
  Values<T, kLanes> y;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    const Compute<T> normal = (x.lane[lane] - moments.mean - moments.correction) * moments.rstd;
    y.lane[lane] = normal * weight.lane[lane] + bias.lane[lane];
  }
  store_values<T, kLanes>(params.output, row_at + column, y);
}

// Keeps the compiler from holding what it has made of packed values: those of the half kinds would take twice
// the registers, and half as many rows would be under way.
template <typename T, int kLanes, int kVectors>
__device__ __forceinline__ void keep_packed(Vector<T, kLanes> (&x)[kVectors]) {
  if constexpr (sizeof(T) == 2 && kLanes % 2 == 0) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      auto* words = reinterpret_cast<unsigned int*>(&x[v]);
#pragma unroll
      for (int word = 0; word < kLanes / 2; ++word) asm volatile("" : "+r"(words[word]));
    }
  }
}

template <typename T, int kLanes, bool kWithinWarp>
__global__ void __launch_bounds__(kMostThreads) layer_norm_forward_in_registers(LayerNormForward params) {
  using C = Compute<T>;
  constexpr int kVectors = kForwardValues<T> / kLanes;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int turn = 0;
  const int team = params.plan.team;
  const int teams = blockDim.x / team;
  const int thread = threadIdx.x % team;
  const int vectors = static_cast<int>(params.columns / kLanes);
  const C scale = scale_for<C>(params.columns);

  // The block's threads stay together, whether they have a row or not: they meet in the sums.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * teams; first < params.rows;
       first += static_cast<int64_t>(gridDim.x) * teams) {
    const int64_t row = first + threadIdx.x / team;
    const int64_t at = row * params.columns;
    const int mine = row < params.rows ? vectors : 0;

    Vector<T, kLanes> x[kVectors];
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine)
        x[v] = load_vector<T, kLanes>(params.input, at + static_cast<int64_t>(index) * kLanes);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v * team + thread < mine) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) sum.first += static_cast<C>(x[v].lane[lane]) * scale;
      }
    }
    C mean = team_sum<kWithinWarp>(sum, team, buffer, turn).first / (static_cast<C>(params.columns) * scale);
    if (mine > 0) mean = pivot<T>(mean, params.input, at);

    keep_packed(x);
    Pair<C> centred = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (v * team + thread < mine) {
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) {
          const C difference = static_cast<C>(x[v].lane[lane]) - mean;
          centred.first += difference * scale;
          centred.second += difference * difference;
        }
      }
    }
    centred = team_sum<kWithinWarp>(centred, team, buffer, turn);
    keep_packed(x);
    const auto moments = moments_from<C>(mean, centred, scale, params.columns, params.eps);

#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine)
        write_normal<T, kLanes>(params, at, static_cast<int64_t>(index) * kLanes, values_of(x[v]), moments);
    }
    if (thread == 0 && row < params.rows) keep_moments(params, row, moments);
  }
}

// The block is the team.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads) layer_norm_forward_in_passes(LayerNormForward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int turn = 0;
  const int team = blockDim.x;
  const int64_t vectors = params.columns / kLanes;
  const C scale = scale_for<C>(params.columns);

  for (int64_t row = blockIdx.x; row < params.rows; row += gridDim.x) {
    const int64_t at = row * params.columns;
    // A sum for each lane: the shorter the sums, the less is lost.
    C sums[kLanes] = {};
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += x.lane[lane] * scale;
    }
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum.first += sums[lane];
    const C sum_of_row = team_sum<false>(sum, team, buffer, turn).first;
    const C mean = pivot<T>(sum_of_row / (static_cast<C>(params.columns) * scale), params.input, at);

    Pair<C> by_lane[kLanes] = {};
    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C difference = x.lane[lane] - mean;
        by_lane[lane].first += difference * scale;
        by_lane[lane].second += difference * difference;
      }
    }
    Pair<C> centred = {C(0), C(0)};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      centred.first += by_lane[lane].first;
      centred.second += by_lane[lane].second;
    }
    centred = team_sum<false>(centred, team, buffer, turn);
    const auto moments = moments_from<C>(mean, centred, scale, params.columns, params.eps);

    for (int64_t index = threadIdx.x; index < vectors; index += team) {
      const auto x = load_values<T, kLanes>(params.input, at + index * kLanes);
      write_normal<T, kLanes>(params, at, index * kLanes, x, moments);
    }
    if (threadIdx.x == 0) keep_moments(params, row, moments);
  }
}

// A row's mean and rstd. Only the bias' gradient can do without.
template <typename C>
__device__ __forceinline__ Pair<C> kept_moments(const LayerNormBackward& params, int64_t row) {
  if (params.mean == nullptr) return {C(0), C(0)};
  return {static_cast<const C*>(params.mean)[row], static_cast<const C*>(params.rstd)[row]};
}

// Adds the threads' sums over rows up and writes the block's part. Threads whose numbers differ by a multiple
// of the team have the same columns; these are added in a fixed order.
template <typename T, int kLanes, int kVectors>
__device__ __forceinline__ void write_part(const Values<T, kLanes> (&sums)[kVectors], void* parts,
                                           int64_t columns, int team, Compute<T>* buffer) {
  using C = Compute<T>;
  const int thread = threadIdx.x % team;
  const int vectors = static_cast<int>(columns / kLanes);
  // Neighbouring teams are added within their warp.
  const int stride = team < kWarp ? kWarp : team;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    // The same for all threads: whoever skips a barrier here, all skip it.
    if (v * team >= vectors) break;
    const int index = v * team + thread;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      C sum = sums[v].lane[lane];
      for (int offset = team; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(kAllLanes, sum, offset);
      __syncthreads();
      buffer[threadIdx.x] = sum;
      __syncthreads();
      if (threadIdx.x < team && index < vectors) {
        C total(0);
        for (int from = threadIdx.x; from < blockDim.x; from += stride) total += buffer[from];
        static_cast<C*>(parts)[blockIdx.x * columns + static_cast<int64_t>(index) * kLanes + lane] = total;
      }
    }
  }
}

// kInput, kParameters: which gradients are asked for.
template <typename T, int kLanes, bool kWithinWarp, bool kInput, bool kParameters>
__global__ void __launch_bounds__(kMostThreads) layer_norm_backward_in_registers(LayerNormBackward params) {
  using C = Compute<T>;
  constexpr int kVectors = kBackwardValues<T> / kLanes;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
  int turn = 0;
  const int team = params.plan.team;
  const int teams = blockDim.x / team;
  const int thread = threadIdx.x % team;
  const int vectors = static_cast<int>(params.columns / kLanes);
  const bool has_moments = params.mean != nullptr;

  Values<T, kLanes> weight_sums[kVectors], bias_sums[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) weight_sums[v].lane[lane] = bias_sums[v].lane[lane] = C(0);
  }

  for (int64_t first = static_cast<int64_t>(blockIdx.x) * teams; first < params.rows;
       first += static_cast<int64_t>(gridDim.x) * teams) {
    const int64_t row = first + threadIdx.x / team;
    const int64_t at = row * params.columns;
    const int mine = row < params.rows ? vectors : 0;
    Pair<C> moments = {C(0), C(0)};
    if (row < params.rows) moments = kept_moments<C>(params, row);
    const C rstd = moments.second;

    // x̂ takes the place of x, and the gradient times the weight that of the gradient.
    Values<T, kLanes> normal[kVectors], grad[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine) {
        const int64_t column = static_cast<int64_t>(index) * kLanes;
        grad[v] = load_values<T, kLanes>(params.grad_output, at + column);
        if (has_moments) normal[v] = load_values<T, kLanes>(params.input, at + column);
      }
    }
    Pair<C> sum = {C(0), C(0)};
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int index = v * team + thread;
      if (index < mine) {
        if (has_moments) {
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            normal[v].lane[lane] = (normal[v].lane[lane] - moments.first) * rstd;
          }
        }
        if constexpr (kParameters) {
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            if (has_moments) weight_sums[v].lane[lane] += grad[v].lane[lane] * normal[v].lane[lane];
            bias_sums[v].lane[lane] += grad[v].lane[lane];
          }
        }
        if constexpr (kInput) {
          const auto weight = load_or<T, kLanes>(params.weight, static_cast<int64_t>(index) * kLanes, C(1));
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            grad[v].lane[lane] *= weight.lane[lane];
            sum.first += grad[v].lane[lane];
            sum.second += grad[v].lane[lane] * normal[v].lane[lane];
          }
        }
      }
    }
    if constexpr (kInput) {
      sum = team_sum<kWithinWarp>(sum, team, buffer, turn);
      const C mean_grad = sum.first / static_cast<C>(params.columns);
      const C mean_product = sum.second / static_cast<C>(params.columns);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const int index = v * team + thread;
        if (index < mine) {
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            grad[v].lane[lane] =
                rstd * (grad[v].lane[lane] - mean_grad - normal[v].lane[lane] * mean_product);
          }
          store_values<T, kLanes>(params.grad_input, at + static_cast<int64_t>(index) * kLanes, grad[v]);
        }
      }
    }
  }

  if constexpr (kParameters) {
    __shared__ C by_thread[kMostThreads];
    if (params.weight_parts != nullptr) {
      write_part<T, kLanes, kVectors>(weight_sums, params.weight_parts, params.columns, team, by_thread);
    }
    if (params.bias_parts != nullptr) {
      write_part<T, kLanes, kVectors>(bias_sums, params.bias_parts, params.columns, team, by_thread);
    }
  }
}

// What one vector of a row contributes: x̂ and the gradient times the weight.
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

// The input's gradient for long rows. The block is the team.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads) layer_norm_backward_in_passes(LayerNormBackward params) {
  using C = Compute<T>;
  __shared__ Pair<C> buffer[2 * kMostThreads / kWarp];
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
        terms.grad.lane[lane] =
            moments.second * (terms.grad.lane[lane] - mean_grad - terms.normal.lane[lane] * mean_product);
      }
      store_values<T, kLanes>(params.grad_input, at + index * kLanes, terms.grad);
    }
  }
}

// The sums over rows for long rows: a thread has kLanes columns, and blockIdx.y is the part.
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
      if (params.weight_parts != nullptr) static_cast<C*>(params.weight_parts)[to + lane] = weight_sums[lane];
      if (params.bias_parts != nullptr) static_cast<C*>(params.bias_parts)[to + lane] = bias_sums[lane];
    }
  }
}

// Adds up the parts: 32 columns a block, 16 threads a column. blockIdx.y is 0 for the weight, 1 for the bias.
constexpr int kGroups = 16;

template <typename T>
__global__ void __launch_bounds__(kWarp* kGroups) layer_norm_finish(LayerNormBackward params) {
  using C = Compute<T>;
  const void* parts = blockIdx.y == 0 ? params.weight_parts : params.bias_parts;
  void* result = blockIdx.y == 0 ? params.grad_weight : params.grad_bias;
  // The whole block returns.
  if (result == nullptr) return;
  __shared__ C sums[kGroups][kWarp];
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kWarp; first < params.columns;
       first += static_cast<int64_t>(gridDim.x) * kWarp) {
    const int64_t column = first + threadIdx.x;
    C sum(0);
    if (column < params.columns) {
      for (int64_t part = threadIdx.y; part < params.parts; part += kGroups) {
        sum += static_cast<const C*>(parts)[part * params.columns + column];
      }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < params.columns) {
      C total(0);
      for (int group = 0; group < kGroups; ++group) total += sums[group][threadIdx.x];
      static_cast<T*>(result)[column] = static_cast<T>(total);
    }
    __syncthreads();
  }
}

bool aligned(const LayerNormForward& params) {
  // Null counts as aligned.
  return is_aligned_to_16(params.input) && is_aligned_to_16(params.weight) && is_aligned_to_16(params.bias) &&
         is_aligned_to_16(params.output);
}

bool aligned(const LayerNormBackward& params) {
  return is_aligned_to_16(params.grad_output) && is_aligned_to_16(params.input) &&
         is_aligned_to_16(params.weight) && is_aligned_to_16(params.grad_input);
}

// Whether the kernels can do what was planned: a mistake of ours must not become an access out of bounds.
template <typename T, typename Params>
bool fits(const Params& params) {
  constexpr int kValues = std::is_same_v<Params, LayerNormForward> ? kForwardValues<T> : kBackwardValues<T>;
  const LayerNormPlan& plan = params.plan;
  const bool is_power_of_two = plan.team > 0 && (plan.team & (plan.team - 1)) == 0;
  return params.kind == params.parameter_kind && is_power_of_two && plan.team <= kMostThreads &&
         (plan.in_registers ? params.columns <= static_cast<int64_t>(plan.team) * kValues
                            : plan.team >= kWarp) &&
         (!plan.vectors || (params.columns % kLanesOf16Bytes<T> == 0 && aligned(params)));
}

unsigned int at_most(int64_t blocks, int64_t most) {
  return static_cast<unsigned int>(blocks < most ? blocks : most);
}

unsigned int threads_of_block(const LayerNormPlan& plan) {
  return plan.in_registers && plan.team < kThreads ? kThreads : plan.team;
}

template <typename T, int kLanes>
void start(const LayerNormForward& params, cudaStream_t stream) {
  if (params.rows == 0) return;
  const unsigned int threads = threads_of_block(params.plan);
  const int64_t teams = threads / params.plan.team;
  const unsigned int blocks = at_most((params.rows + teams - 1) / teams, INT32_MAX);
  if (!params.plan.in_registers) {
    layer_norm_forward_in_passes<T, kLanes><<<blocks, threads, 0, stream>>>(params);
  } else if (params.plan.team <= kWarp) {
    layer_norm_forward_in_registers<T, kLanes, true><<<blocks, threads, 0, stream>>>(params);
  } else {
    layer_norm_forward_in_registers<T, kLanes, false><<<blocks, threads, 0, stream>>>(params);
  }
}

template <typename T, int kLanes, bool kInput, bool kParameters>
void start_in_registers(const LayerNormBackward& params, cudaStream_t stream) {
  // A part a block.
  const unsigned int blocks = static_cast<unsigned int>(params.parts);
  const unsigned int threads = threads_of_block(params.plan);
  if (params.plan.team <= kWarp) {
    layer_norm_backward_in_registers<T, kLanes, true, kInput, kParameters>
        <<<blocks, threads, 0, stream>>>(params);
  } else {
    layer_norm_backward_in_registers<T, kLanes, false, kInput, kParameters>
        <<<blocks, threads, 0, stream>>>(params);
  }
}

template <typename T, int kLanes>
void start(const LayerNormBackward& params, cudaStream_t stream) {
  const bool input = params.grad_input != nullptr;
  const bool parameters = params.weight_parts != nullptr || params.bias_parts != nullptr;
  if (params.plan.in_registers) {
    if (input && parameters) return start_in_registers<T, kLanes, true, true>(params, stream);
    if (input) return start_in_registers<T, kLanes, true, false>(params, stream);
    if (parameters) return start_in_registers<T, kLanes, false, true>(params, stream);
    return;
  }
  if (input && params.rows > 0) {
    const unsigned int blocks = at_most(params.rows, INT32_MAX);
    layer_norm_backward_in_passes<T, kLanes><<<blocks, threads_of_block(params.plan), 0, stream>>>(params);
  }
  if (parameters) {
    const int64_t vectors = params.columns / kLanes;
    const dim3 blocks(at_most((vectors + kThreads - 1) / kThreads, INT32_MAX),
                      static_cast<unsigned int>(params.parts));
    layer_norm_parts<T, kLanes><<<blocks, kThreads, 0, stream>>>(params);
  }
}

template <typename Params>
LaunchStatus launch(const char* kernel, const Params& params, cudaStream_t stream) {
  if (params.columns == 0) return {kernel, nullptr};
  bool planned = false;
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    planned = fits<T>(params);
    if (!planned) return;
    params.plan.vectors ? start<T, kLanesOf16Bytes<T>>(params, stream) : start<T, 1>(params, stream);
  });
  if (!planned) return {kernel, "internal error: the plan does not fit the arrays"};
  return launch_status(kernel);
}

LaunchStatus finish(const char* kernel, const LayerNormBackward& params, cudaStream_t stream) {
  if (params.columns == 0) return {kernel, nullptr};
  if (params.kind != params.parameter_kind) return {kernel, "internal error: mixed kinds"};
  const dim3 blocks(at_most((params.columns + kWarp - 1) / kWarp, INT32_MAX), 2);
  const dim3 threads(kWarp, kGroups);
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    layer_norm_finish<T><<<blocks, threads, 0, stream>>>(params);
  });
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_layer_norm_forward_cuda(const LayerNormForward* params,
                                                                             cudaStream_t stream) {
  return tch_extension::launch("layer_norm_forward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_layer_norm_backward_cuda(const LayerNormBackward* params,
                                                                              cudaStream_t stream) {
  return tch_extension::launch("layer_norm_backward", *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_layer_norm_finish_cuda(const LayerNormBackward* params,
                                                                            cudaStream_t stream) {
  return tch_extension::finish("layer_norm_finish", *params, stream);
}
