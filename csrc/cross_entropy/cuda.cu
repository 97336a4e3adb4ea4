// A block computes a row at a time. If a row is whole 16-byte vectors, and its threads can keep
// them in registers, it is read once; otherwise it is read twice, the second time from the L2 cache
// if it is still there.
#include <limits>

#include "cross_entropy.h"
#include "tch_extension/cuda_vector.h"

// The check of targets stays in a build that defines NDEBUG, as libtorch's own does.
#undef NDEBUG
#include <cassert>

namespace tch_extension {
namespace {

constexpr int kMostThreads = 1024;

// In the half kinds the hardware's approximation is more exact than what is stored.
template <typename T>
__device__ __forceinline__ Compute<T> exp_of(Compute<T> x) {
  if constexpr (std::is_same_v<T, double>) return exp(x);
  if constexpr (std::is_same_v<T, float>) return expf(x);
  return __expf(x);
}

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }

// As std::max, but a NaN stays.
template <typename C>
__device__ __forceinline__ C larger(C a, C b) {
  return a > b || a != a ? a : b;
}

// Reduces over a block; all threads get the result. `shared` has room for a value of each warp, and
// calls that follow one another use different ones.
template <typename C, typename Op>
__device__ __forceinline__ C over_block(C value, C* shared, Op op) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = op(value, __shfl_xor_sync(kAllLanes, value, offset));
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int warps = blockDim.x / kWarp;
  value = shared[0];
  for (int warp = 1; warp < warps; ++warp) value = op(value, shared[warp]);
  return value;
}

// What a block needs to know of its row once the sums are known.
template <typename T>
struct Row {
  using C = Compute<T>;

  __device__ __forceinline__ Row(const LossRows& p, int64_t row) : params(p), row(row) {
    target = p.targets[row];
    is_ignored = target == p.ignore_index;
    // As in libtorch, a target that is no class stops the program.
    assert((is_ignored || (target >= 0 && target < p.classes)) &&
           "cross_entropy: a target is no class");
    logits = static_cast<const T*>(p.logits) + row * p.classes;
    smoothing = static_cast<C>(p.label_smoothing) / static_cast<C>(p.classes);
    const C* weight = static_cast<const C*>(p.weight);
    if (is_ignored) return;
    of_target =
        (C(1) - static_cast<C>(p.label_smoothing)) * (weight == nullptr ? C(1) : weight[target]);
    at_target = static_cast<C>(logits[target]);
  }

  __device__ __forceinline__ bool is_smooth() const { return params.label_smoothing != 0; }
  __device__ __forceinline__ C weight_of(int64_t at) const {
    return params.weight == nullptr ? C(1) : static_cast<const C*>(params.weight)[at];
  }
  __device__ __forceinline__ T* gradients() const {
    return params.gradients == nullptr ? nullptr
                                       : static_cast<T*>(params.gradients) + row * params.classes;
  }

  __device__ __forceinline__ void finish(C most, C of_exp, C weighted) {
    largest = most;
    const C all = params.weight_sum == nullptr ? static_cast<C>(params.classes)
                                               : *static_cast<const C*>(params.weight_sum);
    if (params.losses != nullptr && threadIdx.x == 0) {
      const C lse = largest + log_of(of_exp);
      C loss = of_target * (lse - at_target);
      if (is_smooth()) loss += smoothing * (all * lse - weighted);
      static_cast<C*>(params.losses)[row] = loss;
    }
    if (params.gradients == nullptr) return;
    factor = static_cast<const C*>(params.factors)[row * params.factor_stride];
    of_probability = factor * (of_target + smoothing * all) / of_exp;
  }

  __device__ __forceinline__ C gradient(C logit, int64_t at) const {
    C gradient = of_probability * exp_of<T>(logit - largest);
    if (is_smooth()) gradient -= factor * smoothing * weight_of(at);
    return at == target ? gradient - factor * of_target : gradient;
  }

  __device__ __forceinline__ void ignore() const {
    if (params.losses != nullptr && threadIdx.x == 0) static_cast<C*>(params.losses)[row] = 0;
    T* to = gradients();
    if (to == nullptr) return;
    for (int64_t at = threadIdx.x; at < params.classes; at += blockDim.x) to[at] = T(0.0f);
  }

  const LossRows& params;
  const int64_t row;
  const T* logits;
  int64_t target;
  bool is_ignored;
  C smoothing, of_target = 0, at_target = 0, largest, factor, of_probability;
};

template <typename C>
__device__ __forceinline__ void sum_of_row(C& of_exp, C& weighted, bool is_smooth, C* shared) {
  const auto add = [](C a, C b) { return a + b; };
  of_exp = over_block(of_exp, shared, add);
  if (is_smooth) weighted = over_block(weighted, shared + kMostThreads / kWarp, add);
}

// Room for the maximum and two sums of each warp.
constexpr int kShared = 3 * kMostThreads / kWarp;

template <typename T, int kVectors>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_registers(const __grid_constant__ LossRows params) {
  using C = Compute<T>;
  constexpr int kLanes = kLanesOf16Bytes<T>;
  __shared__ C shared[kShared];
  for (int64_t index = blockIdx.x; index < params.rows; index += gridDim.x) {
    // Nobody may write before all have read what the previous row left.
    __syncthreads();
    Row<T> row(params, index);
    if (row.is_ignored) {
      row.ignore();
      continue;
    }
    Vector<T, kLanes> kept[kVectors];
    C most = -std::numeric_limits<C>::infinity();
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t at = (static_cast<int64_t>(vector) * blockDim.x + threadIdx.x) * kLanes;
      if (at < params.classes) kept[vector] = load_vector<T, kLanes>(row.logits, at);
    }
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t at = (static_cast<int64_t>(vector) * blockDim.x + threadIdx.x) * kLanes;
      if (at >= params.classes) continue;
      const auto values = values_of(kept[vector]);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) most = larger(most, values.lane[lane]);
    }
    most = over_block(most, shared, larger<C>);
    C of_exp = 0, weighted = 0;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t at = (static_cast<int64_t>(vector) * blockDim.x + threadIdx.x) * kLanes;
      if (at >= params.classes) continue;
      const auto values = values_of(kept[vector]);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        of_exp += exp_of<T>(values.lane[lane] - most);
        if (row.is_smooth()) weighted += row.weight_of(at + lane) * values.lane[lane];
      }
    }
    sum_of_row(of_exp, weighted, row.is_smooth(), shared + kMostThreads / kWarp);
    row.finish(most, of_exp, weighted);
    T* to = row.gradients();
    if (to == nullptr) continue;
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t at = (static_cast<int64_t>(vector) * blockDim.x + threadIdx.x) * kLanes;
      if (at >= params.classes) continue;
      auto values = values_of(kept[vector]);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        values.lane[lane] = row.gradient(values.lane[lane], at + lane);
      store_values<T, kLanes>(to, at, values);
    }
  }
}

// Rows of any length that begin anywhere, read twice. Threads sum up as they go: a sum is that of
// exp(z - most so far).
template <typename T, int kLanes>
__global__ void __launch_bounds__(kMostThreads)
    rows_in_two_passes(const __grid_constant__ LossRows params) {
  using C = Compute<T>;
  __shared__ C shared[kShared];
  const int64_t by = static_cast<int64_t>(blockDim.x) * kLanes;
  for (int64_t index = blockIdx.x; index < params.rows; index += gridDim.x) {
    __syncthreads();
    Row<T> row(params, index);
    if (row.is_ignored) {
      row.ignore();
      continue;
    }
    constexpr C kLeast = -std::numeric_limits<C>::infinity();
    C own = kLeast, of_exp = 0, weighted = 0;
    for (int64_t at = static_cast<int64_t>(threadIdx.x) * kLanes; at < params.classes; at += by) {
      const auto values = load_values<T, kLanes>(row.logits, at);
      C most = own;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) most = larger(most, values.lane[lane]);
      // exp(-inf - -inf) would be a NaN.
      if (most != own) of_exp *= own == kLeast ? C(0) : exp_of<T>(own - most);
      own = most;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const C logit = values.lane[lane];
        of_exp += logit == kLeast ? C(0) : exp_of<T>(logit - own);
        if (row.is_smooth()) weighted += row.weight_of(at + lane) * logit;
      }
    }
    const C most = over_block(own, shared, larger<C>);
    if (own != most) of_exp *= own == kLeast ? C(0) : exp_of<T>(own - most);
    sum_of_row(of_exp, weighted, row.is_smooth(), shared + kMostThreads / kWarp);
    row.finish(most, of_exp, weighted);
    T* to = row.gradients();
    if (to == nullptr) continue;
    for (int64_t at = static_cast<int64_t>(threadIdx.x) * kLanes; at < params.classes; at += by) {
      auto values = load_values<T, kLanes>(row.logits, at);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        values.lane[lane] = row.gradient(values.lane[lane], at + lane);
      store_values<T, kLanes>(to, at, values);
    }
  }
}

// One block adds the values of all rows, always in the same order.
template <typename C, typename Value>
__device__ __forceinline__ C sum_of_rows(int64_t rows, Value value) {
  __shared__ C shared[kMostThreads / kWarp];
  C sum = 0;
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) sum += value(row);
  return over_block(sum, shared, [](C a, C b) { return a + b; });
}

template <typename C>
__global__ void __launch_bounds__(kMostThreads)
    mean_kernel(const __grid_constant__ LossMean params) {
  const C* weight = static_cast<const C*>(params.weight);
  const C sum = sum_of_rows<C>(params.rows, [&](int64_t row) {
    const int64_t target = params.targets[row];
    if (target == params.ignore_index) return C(0);
    // The kernel of the rows says so if it is no class; here it must not be read.
    return weight == nullptr                        ? C(1)
           : target < 0 || target >= params.classes ? C(0)
                                                    : weight[target];
  });
  if (threadIdx.x == 0) *static_cast<C*>(params.factor) = C(1) / sum;
}

template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    total_kernel(const __grid_constant__ LossTotal params) {
  using C = Compute<T>;
  const C* losses = static_cast<const C*>(params.losses);
  const C sum = sum_of_rows<C>(params.rows, [&](int64_t row) { return losses[row]; });
  if (threadIdx.x == 0) {
    *static_cast<T*>(params.total) = static_cast<T>(sum * *static_cast<const C*>(params.factor));
  }
}

template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ LossScale params) {
  using C = Compute<T>;
  const C factor = *static_cast<const C*>(params.factor);
  if (factor == C(1)) return;
  const int64_t by = static_cast<int64_t>(gridDim.x) * kThreads * kLanes;
  int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kLanes;
  for (; at < params.count; at += by) {
    auto values = load_values<T, kLanes>(params.values, at);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] *= factor;
    store_values<T, kLanes>(params.values, at, values);
  }
}

// As many warps as a row has vectors for, up to the largest block.
int threads_for(int64_t vectors) {
  const int64_t warps = (vectors + kWarp - 1) / kWarp;
  const int64_t most = kMostThreads / kWarp;
  return static_cast<int>((warps < 1 ? 1 : warps < most ? warps : most) * kWarp);
}

template <typename T>
void start_rows(const LossRows& params, unsigned int blocks, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const bool is_whole = params.classes % kLanes == 0 && is_aligned_to_16(params.logits) &&
                        is_aligned_to_16(params.gradients);
  const int64_t vectors = params.classes / kLanes;
  if (!is_whole) {
    rows_in_two_passes<T, 1><<<blocks, threads_for(params.classes), 0, stream>>>(params);
  } else if (vectors <= kMostThreads) {
    rows_in_registers<T, 1><<<blocks, threads_for(vectors), 0, stream>>>(params);
  } else if (vectors <= 4 * kMostThreads) {
    rows_in_registers<T, 4><<<blocks, threads_for((vectors + 3) / 4), 0, stream>>>(params);
  } else {
    rows_in_two_passes<T, kLanes><<<blocks, kMostThreads, 0, stream>>>(params);
  }
}

unsigned int at_most(int64_t blocks) {
  return static_cast<unsigned int>(blocks < INT32_MAX ? blocks : INT32_MAX);
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

extern "C" LaunchStatus tch_extension_loss_rows_cuda(const LossRows* params, cudaStream_t stream) {
  if (params->rows > 0) {
    for_kind(params->kind, [&](auto type) {
      start_rows<typename decltype(type)::type>(*params, at_most(params->rows), stream);
    });
  }
  return launch_status("loss_rows");
}

extern "C" LaunchStatus tch_extension_loss_mean_cuda(const LossMean* params, cudaStream_t stream) {
  for_kind(params->kind, [&](auto type) {
    using C = Compute<typename decltype(type)::type>;
    mean_kernel<C><<<1, threads_for(params->rows), 0, stream>>>(*params);
  });
  return launch_status("loss_mean");
}

extern "C" LaunchStatus tch_extension_loss_total_cuda(const LossTotal* params,
                                                      cudaStream_t stream) {
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    total_kernel<T><<<1, threads_for(params->rows), 0, stream>>>(*params);
  });
  return launch_status("loss_total");
}

extern "C" LaunchStatus tch_extension_loss_scale_cuda(const LossScale* params,
                                                      cudaStream_t stream) {
  if (params->count > 0) {
    for_kind(params->kind, [&](auto type) {
      using T = typename decltype(type)::type;
      constexpr int kLanes = kLanesOf16Bytes<T>;
      // Several vectors a thread: if the factor is 1, fewer blocks have to come and go.
      constexpr int64_t kOfThread = 8;
      const bool is_whole = params->count % kLanes == 0 && is_aligned_to_16(params->values);
      const int64_t items = params->count / (is_whole ? kLanes : 1) / kOfThread + 1;
      const unsigned int blocks = blocks_for(items);
      if (is_whole) {
        scale_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(*params);
      } else {
        scale_kernel<T, 1><<<blocks, kThreads, 0, stream>>>(*params);
      }
    });
  }
  return launch_status("loss_scale");
}
