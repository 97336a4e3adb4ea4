// A row is computed by one thread.
#include "tch_extension/cpu.h"

#include <cmath>
#include <limits>

#include "loss.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {
namespace {

// A thread gets at least this many logits, because waking one takes a few microseconds.
constexpr int64_t kElements = 2048;

int64_t rows(const LossRows& params) { return params.rows; }

int64_t rows_of_a_thread(const LossRows& params) {
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, params.classes));
}

int64_t pieces_of(const LossScaled& array) { return (array.count + kElements - 1) / kElements; }

int64_t pieces(const LossScale& params) {
  int64_t all = 0;
  for (const LossScaled& array : params.arrays) all += pieces_of(array);
  return all;
}

int64_t pieces_of_a_thread(const LossScale&) { return 4; }

// These are computed by one thread, in order.
template <typename Params>
int64_t one(const Params&) {
  return 1;
}

// Calls body(first class, count) for each vector of a row.
template <typename T, typename Body>
inline void for_each_vector(int64_t classes, Body body) {
  constexpr int64_t kSize = kVecSize<T>;
  int64_t at = 0;
  for (; at + kSize <= classes; at += kSize) body(at, std::integral_constant<int64_t, kSize>{});
  if (at < classes) body(at, classes - at);
}

// Writes value(first class, count) for each vector of a row. Two at a time cost half kinds less.
template <typename T, typename Value>
inline void write_row(int64_t classes, T* to, Value value) {
  constexpr int64_t kSize = kVecSize<T>;
  constexpr std::integral_constant<int64_t, kSize> whole;
  int64_t at = 0;
  for (; at + 2 * kSize <= classes; at += 2 * kSize)
    store_pair(value(at, whole), value(at + kSize, whole), to + at);
  for (; at < classes; at += kSize) {
    const int64_t count = std::min(kSize, classes - at);
    store(value(at, count), to + at, count);
  }
}

// The vector's first `count` values, and `otherwise` in place of the others.
template <typename C>
inline Vec<C> only(const Vec<C>& values, int64_t count, C otherwise) {
  return count == Vec<C>::size() ? values : Vec<C>::set(Vec<C>(otherwise), values, count);
}

template <typename T>
struct Row {
  using C = Compute<T>;
  using V = Vec<C>;

  Row(const LossRows& p, int64_t row) : params(p), classes(p.classes), row(row) {
    logits = static_cast<const T*>(p.logits) + row * p.row_stride;
    gradients =
        p.gradients == nullptr ? nullptr : static_cast<T*>(p.gradients) + row * p.row_stride;
    weight = static_cast<const C*>(p.weight);
    target = p.targets[row];
    smoothing = static_cast<C>(p.label_smoothing) / static_cast<C>(classes);
    softcap = static_cast<C>(p.softcap);
    is_smooth = p.label_smoothing != 0;
  }

  void run() {
    if (target == params.ignore_index) {
      if (params.losses != nullptr) static_cast<C*>(params.losses)[row] = 0;
      if (gradients != nullptr) std::fill_n(gradients, classes, T(0));
      return;
    }
    // The caller has checked the targets; this keeps a mistake from becoming a wild read.
    if (target < 0 || target >= classes) return;
    // Before anything is written: the gradients may take the logits' place.
    const C at_target = capped(static_cast<C>(logits[target]));
    sum_up();
    const C of_target = (C(1) - static_cast<C>(params.label_smoothing)) *
                        (weight == nullptr ? C(1) : weight[target]);
    const C all_weights = params.weight_sum == nullptr ? static_cast<C>(classes)
                                                       : *static_cast<const C*>(params.weight_sum);
    const C rest = std::log(sum), lse = largest + rest, z_loss = static_cast<C>(params.z_loss);
    if (params.losses != nullptr) {
      C loss = of_target * (rest - (at_target - largest));
      if (is_smooth) loss += smoothing * (all_weights * rest - weighted);
      if (z_loss != 0) loss += z_loss * lse * lse;
      static_cast<C*>(params.losses)[row] = loss;
    }
    if (gradients == nullptr) return;
    C factor = params.factor == nullptr ? C(1) : *static_cast<const C*>(params.factor);
    if (params.grads != nullptr) {
      const int64_t at = row * params.grad_stride;
      factor *= params.wide_grads ? static_cast<const C*>(params.grads)[at]
                                  : static_cast<C>(static_cast<const T*>(params.grads)[at]);
    }
    C of_lse = of_target + smoothing * all_weights;
    if (z_loss != 0) of_lse += C(2) * z_loss * lse;
    const C of_probability = factor * of_lse / sum;
    const C of_class = smoothing * (weight == nullptr ? C(1) : weight[target]);
    C here = of_probability * std::exp(at_target - largest) - factor * (of_target + of_class);
    if (softcap != 0) here *= C(1) - at_target / softcap * (at_target / softcap);
    write_gradients(of_probability, factor * smoothing);
    gradients[target] = static_cast<T>(here);
  }

  void sum_up() {
    constexpr C kLeast = -std::numeric_limits<C>::infinity();
    V most(kLeast);
    for_each_vector<T>(classes, [&](int64_t at, int64_t count) {
      most = at::vec::maximum(most, only<C>(capped(load(logits + at, count)), count, kLeast));
    });
    largest = at::vec::vec_reduce_all<C>([](V& a, V& b) { return at::vec::maximum(a, b); }, most);
    // In the larger kinds the exponentials are kept where the gradients will be.
    T* const kept = kKeeps && softcap == 0 ? gradients : nullptr;
    V sums(C(0)), of_weights(C(0));
    for_each_vector<T>(classes, [&](int64_t at, int64_t count) {
      const V less = capped(load(logits + at, count)) - V(largest);
      // libtorch's log_softmax takes the same exponential: off by up to 20 units in the last place.
      const V exps = less.exp_u20();
      if (kept != nullptr) store(exps, kept + at, count);
      sums = sums + only<C>(exps, count, C(0));
      if (is_smooth) of_weights = of_weights + only<C>(weighted_by(less, at, count), count, C(0));
    });
    is_kept = kept != nullptr;
    const auto add = [](V& a, V& b) { return a + b; };
    sum = at::vec::vec_reduce_all<C>(add, sums);
    if (is_smooth) weighted = at::vec::vec_reduce_all<C>(add, of_weights);
    // The fast exponential of a NaN is a number. A row of -inf, or with +inf, has no loss.
    if (!std::isfinite(largest)) sum = std::numeric_limits<C>::quiet_NaN();
  }

  // The logits from which the loss is computed.
  V capped(const V& values) const {
    return softcap == 0 ? values : (values / V(softcap)).tanh() * V(softcap);
  }
  C capped(C value) const { return softcap == 0 ? value : std::tanh(value / softcap) * softcap; }

  V weighted_by(const V& values, int64_t at, int64_t count) const {
    return weight == nullptr ? values : values * load(weight + at, count);
  }

  void write_gradients(C of_probability, C of_class) {
    write_row(classes, gradients, [&](int64_t at, int64_t count) {
      if (is_kept)
        return gradient_of(load(gradients + at, count), of_probability, of_class, at, count);
      const V values = capped(load(logits + at, count));
      const V gradient =
          gradient_of((values - V(largest)).exp_u20(), of_probability, of_class, at, count);
      if (softcap == 0) return gradient;
      const V share = values / V(softcap);
      return gradient * (V(1) - share * share);
    });
  }

  V gradient_of(const V& exps, C of_probability, C of_class, int64_t at, int64_t count) const {
    const V gradient = exps * V(of_probability);
    return is_smooth ? gradient - weighted_by(V(of_class), at, count) : gradient;
  }

  static constexpr bool kKeeps = std::is_same_v<T, C>;

  const LossRows& params;
  const int64_t classes, row;
  const T* logits;
  T* gradients;
  const C* weight;
  int64_t target;
  C smoothing, softcap, largest = 0, sum = 0, weighted = 0;
  bool is_smooth, is_kept = false;
};

}  // namespace

static void loss_rows(const LossRows& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t row = begin; row < end; ++row) Row<T>(params, row).run();
  });
}

// 1 / Σ w[t] over rows that are not ignored.
template <typename C>
static C mean_factor(const LossTotal& params) {
  const C* weight = static_cast<const C*>(params.weight);
  double sum = 0;
  for (int64_t row = 0; row < params.rows; ++row) {
    const int64_t target = params.targets[row];
    if (target == params.ignore_index) continue;
    if (weight != nullptr && (target < 0 || target >= params.classes)) continue;
    sum += weight == nullptr ? 1.0 : static_cast<double>(weight[target]);
  }
  return static_cast<C>(1 / sum);
}

static void loss_total(const LossTotal& params, int64_t, int64_t) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    C* factor = static_cast<C*>(params.factor);
    if (params.of_mean) *factor = mean_factor<C>(params);
    if (params.total == nullptr) return;
    const C* losses = static_cast<const C*>(params.losses);
    double sum = 0;
    for (int64_t row = 0; row < params.rows; ++row) sum += static_cast<double>(losses[row]);
    const C by = factor == nullptr ? C(1) : *factor;
    *static_cast<T*>(params.total) = static_cast<T>(static_cast<C>(sum) * by);
  });
}

static void loss_scale(const LossScale& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    using C = Compute<T>;
    const C number = params.wide_factor ? *static_cast<const C*>(params.factor)
                                        : static_cast<C>(*static_cast<const T*>(params.factor));
    const Vec<C> factor(number);
    // The pieces of the arrays are counted one after another.
    int64_t before = 0;
    for (const LossScaled& array : params.arrays) {
      const int64_t first = std::max<int64_t>(begin - before, 0) * kElements;
      const int64_t last = std::min((end - before) * kElements, array.count);
      before += pieces_of(array);
      if (first >= last || (number == C(1) && array.from == array.to)) continue;
      const auto scale = [&](const auto* from, auto* to) {
        write_row(last - first, to + first, [&](int64_t at, int64_t count) {
          return load(from + first + at, count) * factor;
        });
      };
      const T* from = static_cast<const T*>(array.from);
      C* wide_to = static_cast<C*>(array.to);
      if (array.wide_from) {
        scale(static_cast<const C*>(array.from), wide_to);
      } else if (array.wide_to) {
        scale(from, wide_to);
      } else {
        scale(from, static_cast<T*>(array.to));
      }
    }
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_loss_rows, loss_rows, LossRows, tch_extension::rows,
                         tch_extension::rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_loss_total, loss_total, LossTotal, tch_extension::one,
                         tch_extension::one)
TCH_EXTENSION_CPU_KERNEL(tch_extension_loss_scale, loss_scale, LossScale, tch_extension::pieces,
                         tch_extension::pieces_of_a_thread)
