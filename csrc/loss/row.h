// A row of logits on CUDA: what its threads sum up in one pass, and its loss and gradient after
// that. The formulas are in loss.h.
#pragma once

#include <limits>

#include "../hopper/approximate.h"
#include "params.h"
#include "tch_extension/cuda_vector.h"

// The check of targets stays in a build that defines NDEBUG, as libtorch's own does.
#undef NDEBUG
#include <cassert>

namespace tch_extension::loss {
namespace {

template <typename C>
constexpr C kLeast = -std::numeric_limits<C>::infinity();

// exp(x). In the half kinds the hardware's approximation is more exact than what is stored.
template <typename T>
__device__ __forceinline__ Compute<T> exp_of(Compute<T> x) {
  if constexpr (std::is_same_v<T, double>) return exp(x);
  if constexpr (std::is_same_v<T, float>) return expf(x);
  return hopper::fast_exp(x);
}

__device__ __forceinline__ float log_of(float x) { return logf(x); }
__device__ __forceinline__ double log_of(double x) { return log(x); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

// As std::max, but a NaN stays.
__device__ __forceinline__ double larger(double a, double b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ float larger(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b || a != a ? a : b;
#endif
}

// The sums over some logits of a row, of_exp = Σ exp(z - most), weighted = Σ w (z - most) and
// weights = Σ w. The last two are those of a row with smoothing only. As long as all logits are
// -inf, weighted is Σ w z, because -inf - -inf would be a NaN.
template <typename T>
struct Sums {
  using C = Compute<T>;

  // Those over no logits.
  static __device__ __forceinline__ Sums none() { return {kLeast<C>, C(0), C(0), C(0)}; }

  // Adds those of other logits.
  __device__ __forceinline__ void add(Sums other, bool is_smooth) {
    const C larger_one = larger(most, other.most);
    raise(larger_one, is_smooth);
    other.raise(larger_one, is_smooth);
    of_exp += other.of_exp;
    weighted += other.weighted;
    weights += other.weights;
  }

  // The same sums with another maximum, which is not smaller.
  __device__ __forceinline__ void raise(C to, bool is_smooth) {
    if (most == to) return;
    // Otherwise there is nothing to change: of_exp is 0.
    if (most != kLeast<C>) {
      of_exp *= exp_of<T>(most - to);
      if (is_smooth) weighted += weights * (most - to);
    }
    most = to;
  }

  __device__ __forceinline__ void add_over_warp(bool is_smooth) { add_over(kWarp, is_smooth); }

  // Adds those of a team of lanes, whose number is a power of two; all get the result.
  __device__ __forceinline__ void add_over(int team, bool is_smooth) {
    C all = most;
#pragma unroll
    for (int offset = team / 2; offset > 0; offset /= 2)
      all = larger(all, __shfl_xor_sync(kAllLanes, all, offset));
    raise(all, is_smooth);
#pragma unroll
    for (int offset = team / 2; offset > 0; offset /= 2)
      of_exp += __shfl_xor_sync(kAllLanes, of_exp, offset);
    if (!is_smooth) return;
#pragma unroll
    for (int offset = team / 2; offset > 0; offset /= 2) {
      weighted += __shfl_xor_sync(kAllLanes, weighted, offset);
      weights += __shfl_xor_sync(kAllLanes, weights, offset);
    }
  }

  C most, of_exp, weighted, weights;
};

// kPlain: there are neither weights nor smoothing, softcap or z-loss, whose code would cost others
// registers.
template <typename T, bool kPlain>
struct Row {
  using C = Compute<T>;

  // `wanted` is the row's target, which the caller may have loaded long before.
  __device__ __forceinline__ Row(const LossRows& p, int64_t row, int64_t wanted)
      : params(p), row(row), target(wanted), is_ignored(wanted == p.ignore_index) {
    // As in libtorch, a target that is no class stops the program.
    assert((is_ignored || (target >= 0 && target < p.classes)) &&
           "cross_entropy: a target is no class");
    logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    gradients =
        p.gradients == nullptr ? nullptr : static_cast<T*>(p.gradients) + row * p.row_stride;
    smoothing = static_cast<C>(p.label_smoothing) / static_cast<C>(p.classes);
    softcap = static_cast<C>(p.softcap);
    if (!is_ignored) {
      of_target = kPlain ? C(1) : (C(1) - static_cast<C>(p.label_smoothing)) * weight_of(target);
    }
    if (p.grads != nullptr) {
      const int64_t at = row * p.grad_stride;
      incoming = p.wide_grads ? static_cast<const C*>(p.grads)[at]
                              : static_cast<C>(static_cast<const T*>(p.grads)[at]);
    }
  }

  __device__ __forceinline__ bool is_smooth() const {
    return !kPlain && params.label_smoothing != 0;
  }
  __device__ __forceinline__ bool is_capped() const { return !kPlain && params.softcap != 0; }
  __device__ __forceinline__ bool has_z_loss() const { return !kPlain && params.z_loss != 0; }
  __device__ __forceinline__ C weight_of(int64_t at) const {
    if constexpr (kPlain) return C(1);
    return params.weight == nullptr ? C(1) : static_cast<const C*>(params.weight)[at];
  }

  // The logit from which the loss is computed.
  __device__ __forceinline__ C capped(C logit) const {
    return is_capped() ? softcap * tanh_of(logit / softcap) : logit;
  }

  __device__ __forceinline__ C logit_of_target() const {
    return capped(static_cast<C>(logits[target]));
  }

  // Adds adjacent values, of which the first is that of class `at`, to the sums. Where a vector
  // begins before the row or ends after it, there are values that are no classes: -inf.
  template <int kLanes>
  __device__ __forceinline__ void sum_up(Values<T, kLanes> values, int64_t at,
                                         Sums<T>& sums) const {
    C most = sums.most;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (is_capped() && is_class(at + lane)) values.lane[lane] = capped(values.lane[lane]);
      most = larger(most, values.lane[lane]);
    }
    if (most != kLeast<C>) {
      sums.raise(most, is_smooth());
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sums.of_exp += exp_of<T>(values.lane[lane] - most);
    }
    if (!is_smooth()) return;
    const C from = most != kLeast<C> ? most : C(0);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!is_class(at + lane)) continue;
      const C weight = weight_of(at + lane);
      sums.weighted += weight * (values.lane[lane] - from);
      sums.weights += weight;
    }
  }

  __device__ __forceinline__ bool is_class(int64_t at) const {
    return at >= 0 && at < params.classes;
  }

  __device__ __forceinline__ C all_weights() const {
    return params.weight_sum == nullptr ? static_cast<C>(params.classes)
                                        : *static_cast<const C*>(params.weight_sum);
  }

  // Returns the loss, or 0 if nobody needs it.
  __device__ __forceinline__ C write_loss(const Sums<T>& sums, C at_target) const {
    if (params.losses == nullptr) return C(0);
    const C rest = log_of(sums.of_exp), lse = sums.most + rest;
    C loss = of_target * (rest - (at_target - sums.most));
    if (is_smooth()) loss += smoothing * (all_weights() * rest - sums.weighted);
    if (has_z_loss()) loss += static_cast<C>(params.z_loss) * lse * lse;
    static_cast<C*>(params.losses)[row] = loss;
    return loss;
  }

  __device__ __forceinline__ void write_no_loss() const {
    if (params.losses != nullptr) static_cast<C*>(params.losses)[row] = 0;
  }

  const LossRows& params;
  const int64_t row, target;
  const bool is_ignored;
  const T* logits;
  T* gradients;
  C smoothing, softcap, of_target = 0;
  C incoming = 1;  // gradient of the loss
};

// The gradient of a row whose sums are known.
template <typename T, bool kPlain>
struct Gradient {
  using C = Compute<T>;

  // `of_loss` is by what the row's loss is multiplied in the total.
  __device__ __forceinline__ Gradient(const Row<T, kPlain>& row, const Sums<T>& sums, C of_loss)
      : row(row), most(sums.most), factor(of_loss * row.incoming) {
    const LossRows& params = row.params;
    C of_lse = row.of_target;
    if (row.is_smooth()) of_lse += row.smoothing * row.all_weights();
    if (row.has_z_loss())
      of_lse += C(2) * static_cast<C>(params.z_loss) * (sums.most + log_of(sums.of_exp));
    of_probability = factor * of_lse / sums.of_exp;
  }

  // The gradients of adjacent logits, of which the first is that of class `at`.
  template <int kLanes>
  __device__ __forceinline__ Values<T, kLanes> operator()(Values<T, kLanes> values,
                                                          int64_t at) const {
    Values<T, kLanes> gradients;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      values.lane[lane] = row.capped(values.lane[lane]);
      gradients.lane[lane] = of_probability * exp_of<T>(values.lane[lane] - most);
    }
    if (row.is_smooth()) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (row.is_class(at + lane))
          gradients.lane[lane] -= factor * row.smoothing * row.weight_of(at + lane);
      }
    }
    const int64_t target = row.target - at;
    if (target >= 0 && target < kLanes) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        if (lane == target) gradients.lane[lane] -= factor * row.of_target;
      }
    }
    if (!row.is_capped()) return gradients;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const C share = values.lane[lane] / row.softcap;
      gradients.lane[lane] *= C(1) - share * share;
    }
    return gradients;
  }

  const Row<T, kPlain>& row;
  C most, factor, of_probability;
};

}  // namespace
}  // namespace tch_extension::loss
