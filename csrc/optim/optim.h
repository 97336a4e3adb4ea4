// Updates of all parameters at once. Nothing waits for the host: the number of steps, the learning
// rate and the norm of the gradients stay on the device, so that a step can be captured in a graph.
//
// A step is two kernels:
//   scan     reads the gradients, if they are clipped or scaled: Σ g², and whether all are finite.
//            Its last block does `prepare`.
//   prepare  counts the step and computes the coefficients of each span (OptimCoefficients).
//   update   reads weights, gradients and moments, and writes weights and moments.
//
// With g' = clip · g / scale and t steps, AdamW is torch.optim.AdamW:
//
//   w ← (1 - lr λ) w;  m ← β₁ m + (1 - β₁) g';  v ← β₂ v + (1 - β₂) g'²
//   w ← w - lr / (1 - β₁ᵗ) · m / (√v / √(1 - β₂ᵗ) + ε)
//
// With AMSGrad, √v is the root of the largest v so far. With `maximize`, g' has the other sign.
// SGD is torch.optim.SGD with momentum μ and dampening τ (which is 0 in the first step):
//
//   d = g' + λ w;  b ← μ b + (1 - τ) d;  d ← b, or d + μ b for Nesterov;  w ← w - lr d
//
// Muon is torch.optim.Muon: a first update writes the direction d of a matrix, whose memory is 0
// before, and after its orthogonalisation SGD without momentum updates the weights.
//
//   b ← μ b + (1 - μ) g';  d = b, or (1 - μ) g' + μ b for Nesterov
//
// Half kinds are computed in float. Floor of AdamW in float: 28 bytes per value, 36 with AMSGrad,
// and 4 for the norm.
#pragma once

#include <cmath>

#include "params.h"
#include "tch_extension/host_device.h"

namespace tch_extension::optim {

// What gradients are multiplied by so that their norm is at most `max_norm`, as in
// torch.nn.utils.clip_grad_norm_. NaN stays NaN.
TCH_EXTENSION_HOST_DEVICE double clip_of(double squares, double max_norm) {
  using std::sqrt;
  const double clip = max_norm / (sqrt(squares) + 1e-6);
  return clip > 1 ? 1 : clip;
}

// An infinite maximum only measures. The norm may be infinite, too, and the quotient would be NaN.
TCH_EXTENSION_HOST_DEVICE bool is_clipped(const OptimStep& step) {
  constexpr double kMost = 1.7976931348623157e308;
  return step.max_norm != nullptr && *step.max_norm <= kMost;
}

// What the scan found in all gradients.
struct Totals {
  double squares;
  double infinite;
};

TCH_EXTENSION_HOST_DEVICE Totals totals_of(const OptimStep& step) {
  return step.totals == nullptr ? Totals{0, 0} : Totals{step.totals[0], step.totals[1]};
}

// Whether the step is skipped.
TCH_EXTENSION_HOST_DEVICE bool found_inf(const OptimStep& step, const Totals& totals) {
  if (step.is_scaled != 0) return totals.infinite != 0;
  return step.found_inf != nullptr && *step.found_inf != 0;
}

// Writes what the host may ask for later.
TCH_EXTENSION_HOST_DEVICE void report(const OptimStep& step, const Totals& totals) {
  using std::sqrt;
  if (step.norm != nullptr) *step.norm = sqrt(totals.squares);
  if (step.is_scaled != 0 && step.found_inf != nullptr) {
    *step.found_inf = totals.infinite != 0 ? 1.0f : 0.0f;
  }
}

// What scaled gradients are multiplied by: rounded to float, as GradScaler does it.
TCH_EXTENSION_HOST_DEVICE double inverse_of(const float* scale) {
  return scale == nullptr ? 1 : static_cast<double>(static_cast<float>(1.0 / *scale));
}

// Counts the step of a span and computes its coefficients.
TCH_EXTENSION_HOST_DEVICE void prepare(const OptimStep& step, const OptimSpan& span,
                                       const Totals& totals, bool skip, OptimCoefficients* result) {
  using std::pow;
  using std::sqrt;
  const OptimHyper& hyper = *span.hyper;
  OptimCoefficients c{};
  c.skip = skip ? 1 : 0;
  c.inverse_scale = inverse_of(step.grad_scale) * (hyper.maximize != 0 ? -1 : 1);
  c.clip = is_clipped(step) ? clip_of(totals.squares, *step.max_norm) : 1;
  c.first = hyper.first;
  const int64_t steps = *span.step + 1;
  bool counts = !skip;
  if (step.rule == OptimRule::Muon) {
    // SGD's formula, of gradients times 1 - μ. The first kernel of the step has counted it.
    c.clip *= 1 - hyper.first;
    c.rate = -1;
    c.second = 1;
    c.root = hyper.nesterov;
    counts = false;
  } else if (step.rule != OptimRule::Sgd) {
    c.rate = hyper.lr / (1 - pow(hyper.first, static_cast<double>(steps)));
    c.decay = 1 - hyper.lr * hyper.weight_decay;
    c.second = hyper.second;
    c.root = 1 / sqrt(1 - pow(hyper.second, static_cast<double>(steps)));
    c.epsilon = hyper.epsilon;
  } else {
    if (span.first == nullptr) c.first = 0;
    c.rate = hyper.lr;
    c.decay = hyper.weight_decay;
    c.second = steps == 1 ? 1 : 1 - hyper.second;
    c.root = hyper.nesterov;
    counts = counts && c.first != 0;
  }
  if (counts) *span.step = steps;
  *result = c;
}

// The rules, for values of type X, which is a number or a vector of them. C is the type in which
// they are computed. Each uses the first `kMoments` of `first`, `second` and `largest`.
template <typename X, typename C, bool kIsAmsGrad>
struct Adam {
  static constexpr int kMoments = kIsAmsGrad ? 3 : 2;

  X inverse_scale, clip, decay, first, first_rest, second, second_rest, rate, root, epsilon;

  TCH_EXTENSION_HOST_DEVICE explicit Adam(const OptimCoefficients& c)
      : inverse_scale(static_cast<C>(c.inverse_scale)),
        clip(static_cast<C>(c.clip)),
        decay(static_cast<C>(c.decay)),
        first(static_cast<C>(c.first)),
        first_rest(static_cast<C>(1 - c.first)),
        second(static_cast<C>(c.second)),
        second_rest(static_cast<C>(1 - c.second)),
        rate(static_cast<C>(c.rate)),
        root(static_cast<C>(c.root)),
        epsilon(static_cast<C>(c.epsilon)) {}

  // `square_root` and `larger` are the functions of X. A NaN is larger than any number.
  template <typename SquareRoot, typename Larger>
  TCH_EXTENSION_HOST_DEVICE void operator()(X& w, X g, X& m, X& v, X& largest,
                                            SquareRoot square_root, Larger larger) const {
    g = g * inverse_scale * clip;
    w = w * decay;
    m = first * m + first_rest * g;
    v = second * v + second_rest * (g * g);
    if constexpr (kIsAmsGrad) largest = larger(largest, v);
    w = w - rate * m / (square_root(kIsAmsGrad ? largest : v) * root + epsilon);
  }
};

template <typename X, typename C>
using AdamW = Adam<X, C, false>;
template <typename X, typename C>
using AmsGrad = Adam<X, C, true>;

template <typename X, typename C>
struct Sgd {
  static constexpr int kMoments = 1;

  X inverse_scale, clip, rate, decay, momentum, gain;
  bool has_momentum, is_nesterov;

  TCH_EXTENSION_HOST_DEVICE explicit Sgd(const OptimCoefficients& c)
      : inverse_scale(static_cast<C>(c.inverse_scale)),
        clip(static_cast<C>(c.clip)),
        rate(static_cast<C>(c.rate)),
        decay(static_cast<C>(c.decay)),
        momentum(static_cast<C>(c.first)),
        gain(static_cast<C>(c.second)),
        has_momentum(c.first != 0),
        is_nesterov(c.root != 0) {}

  template <typename SquareRoot, typename Larger>
  TCH_EXTENSION_HOST_DEVICE void operator()(X& w, X g, X& b, X&, X&, SquareRoot, Larger) const {
    g = g * inverse_scale * clip;
    g = g + decay * w;
    if (has_momentum) {
      b = momentum * b + gain * g;
      g = is_nesterov ? g + momentum * b : b;
    }
    w = w - rate * g;
  }
};

}  // namespace tch_extension::optim
