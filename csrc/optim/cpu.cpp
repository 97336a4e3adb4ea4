// A chunk of a span is an item of libtorch's threads.
#include "tch_extension/cpu.h"

#include "optim.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {
namespace {

// A thread gets at least this many values, as in libtorch's kernels for vectors.
constexpr int64_t kGrain = 32768;

template <typename Params>
int64_t chunks(const Params& params) {
  return params.chunks;
}

template <typename Params>
int64_t chunks_of_a_thread(const Params& params) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, params.chunk));
}

// The part of a span that is a chunk.
struct Part {
  int64_t index, begin, count;
};

// Calls body(part) for each chunk of a range.
template <typename Params, typename Body>
void for_each_chunk(const Params& params, int64_t begin, int64_t end, const Body& body) {
  const OptimSpan* last = params.spans + params.count;
  const auto is_later = [](int64_t chunk, const OptimSpan& span) { return chunk < span.begin; };
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    // Spans without values share their `begin` with the span after them.
    const OptimSpan* span = std::upper_bound(params.spans, last, chunk, is_later) - 1;
    const int64_t at = (chunk - span->begin) * params.chunk;
    body(chunk, Part{span - params.spans, at, std::min(params.chunk, span->len - at)});
  }
}

// Calls body(at, count) for each vector of a chunk.
template <int64_t kSize, typename Body>
void for_each_vector(int64_t values, const Body& body) {
  constexpr std::integral_constant<int64_t, kSize> kWhole{};
  int64_t at = 0;
  for (; at + kSize <= values; at += kSize) body(at, kWhole);
  if (at < values) body(at, values - at);
}

struct None {};

// Scalar loops would give other bits than vectors where compilers contract products and sums, so
// the last vector of a span is computed like the others.
template <typename W, typename R, typename G, typename M, template <typename, typename> class Rule>
void update_part(const OptimSpan& span, const OptimCoefficients& coefficients, const Part& part) {
  using C = Compute<W>;
  using V = Vec<C>;
  constexpr bool kHasSecond = Rule<V, C>::kMoments > 1, kHasLargest = Rule<V, C>::kMoments > 2;
  const Rule<V, C> rule(coefficients);
  const auto root = [](const V& value) { return value.sqrt(); };
  const auto larger = [](const V& a, const V& b) { return at::vec::maximum(a, b); };
  W* weight = static_cast<W*>(span.weight) + part.begin;
  const G* gradient = static_cast<const G*>(span.gradient) + part.begin;
  M* first = span.first == nullptr ? nullptr : static_cast<M*>(span.first) + part.begin;
  M* second = kHasSecond ? static_cast<M*>(span.second) + part.begin : nullptr;
  M* largest = kHasLargest ? static_cast<M*>(span.largest) + part.begin : nullptr;
  for_each_vector<V::size()>(part.count, [&](int64_t at, auto count) {
    V w = load(weight + at, count), m(C(0)), v(C(0)), most(C(0));
    if (first != nullptr) m = load(first + at, count);
    if constexpr (kHasSecond) v = load(second + at, count);
    if constexpr (kHasLargest) most = load(largest + at, count);
    rule(w, load(gradient + at, count), m, v, most, root, larger);
    store(w, weight + at, count);
    if (first != nullptr) store(m, first + at, count);
    if constexpr (kHasSecond) store(v, second + at, count);
    if constexpr (kHasLargest) store(most, largest + at, count);
    if constexpr (!std::is_same_v<R, None>) {
      store(w, static_cast<R*>(span.rounded) + part.begin + at, count);
    }
  });
}

template <typename W, typename R, typename G, typename M>
void update_by_rule(OptimRule rule, const OptimSpan& span, const OptimCoefficients& coefficients,
                    const Part& part) {
  switch (rule) {
    case OptimRule::AdamW:
      return update_part<W, R, G, M, optim::AdamW>(span, coefficients, part);
    case OptimRule::AmsGrad:
      return update_part<W, R, G, M, optim::AmsGrad>(span, coefficients, part);
    case OptimRule::Sgd:
    case OptimRule::Muon:
      return update_part<W, R, G, M, optim::Sgd>(span, coefficients, part);
  }
}

// Calls body(Type<W>{}, Type<R>{}, Type<G>{}) with the element types of the weights, the rounded
// weights and the gradients, if there are kernels for these three.
template <typename Body>
void for_kinds(const OptimSpan& span, const Body& body) {
  for_kind(span.kind, [&](auto weight) {
    using W = typename decltype(weight)::type;
    if constexpr (std::is_same_v<W, double>) {
      if (span.gradient_kind == span.kind) body(weight, Type<None>{}, weight);
    } else if constexpr (std::is_same_v<W, float>) {
      const bool has_own = span.gradient_kind == span.kind;
      if (span.rounded == nullptr) {
        if (has_own) body(weight, Type<None>{}, weight);
        return;
      }
      for_kind(span.rounded_kind, [&](auto rounded) {
        if constexpr (sizeof(typename decltype(rounded)::type) == 2) {
          if (has_own) return body(weight, rounded, weight);
          if (span.gradient_kind == span.rounded_kind) body(weight, rounded, rounded);
        }
      });
    } else {
      if (span.gradient_kind == kTchExtensionFloat) {
        body(weight, Type<None>{}, Type<float>{});
      } else if (span.gradient_kind == span.kind) {
        body(weight, Type<None>{}, weight);
      }
    }
  });
}

}  // namespace

static void optim_update(const OptimStep& step, int64_t begin, int64_t end) {
  for_each_chunk(step, begin, end, [&](int64_t, const Part& part) {
    const OptimSpan& span = step.spans[part.index];
    const OptimCoefficients& coefficients = step.coefficients[part.index];
    if (coefficients.skip != 0) return;
    for_kinds(span, [&](auto weight, auto rounded, auto gradient) {
      using W = typename decltype(weight)::type;
      using R = typename decltype(rounded)::type;
      using G = typename decltype(gradient)::type;
      if constexpr (sizeof(W) == 2) {
        if (span.moment_kind == span.kind) {
          return update_by_rule<W, R, G, W>(step.rule, span, coefficients, part);
        }
      }
      update_by_rule<W, R, G, Compute<W>>(step.rule, span, coefficients, part);
    });
  });
}

static void optim_squares(const OptimStep& step, int64_t begin, int64_t end) {
  const double inverse = optim::inverse_of(step.grad_scale);
  for_each_chunk(step, begin, end, [&](int64_t chunk, const Part& part) {
    const OptimSpan& span = step.spans[part.index];
    double squares = 0, sum_of_zeros = 0;
    for_kind(span.gradient_kind, [&](auto type) {
      using G = typename decltype(type)::type;
      using C = Compute<G>;
      using V = Vec<C>;
      const G* gradient = static_cast<const G*>(span.gradient) + part.begin;
      const V scale(static_cast<C>(inverse)), zero(C(0));
      V sum(C(0)), zeros(C(0));
      for_each_vector<V::size()>(part.count, [&](int64_t at, auto count) {
        const V g = load(gradient + at, count);
        // 0 · g is NaN where g is infinite or NaN.
        zeros = zeros + g * zero;
        const V unscaled = g * scale;
        sum = at::vec::fmadd(unscaled, unscaled, sum);
      });
      C sums[V::size()], all_zeros[V::size()];
      sum.store(sums);
      zeros.store(all_zeros);
      for (int lane = 0; lane < V::size(); ++lane) {
        squares += static_cast<double>(sums[lane]);
        sum_of_zeros += static_cast<double>(all_zeros[lane]);
      }
    });
    step.partials[2 * chunk] = squares;
    step.partials[2 * chunk + 1] = sum_of_zeros == 0 ? 0 : 1;
  });
}

static void optim_rewrite_chunks(const OptimRewrite& params, int64_t begin, int64_t end) {
  const bool clamps = params.squares == nullptr;
  const double clip = clamps ? 1 : optim::clip_of(*params.squares, params.max);
  if (!clamps && clip == 1) return;
  for_each_chunk(params, begin, end, [&](int64_t, const Part& part) {
    const OptimSpan& span = params.spans[part.index];
    for_kind(span.gradient_kind, [&](auto type) {
      using G = typename decltype(type)::type;
      using V = Vec<Compute<G>>;
      G* gradient = static_cast<G*>(span.gradient) + part.begin;
      const V factor(static_cast<Compute<G>>(clip)), most(static_cast<Compute<G>>(params.max));
      for_each_vector<V::size()>(part.count, [&](int64_t at, auto count) {
        const V g = load(gradient + at, count);
        const V limited = clamps ? at::vec::clamp(g, most.neg(), most) : g * factor;
        store(limited, gradient + at, count);
      });
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_optim_update, optim_update, OptimStep, tch_extension::chunks,
                         tch_extension::chunks_of_a_thread)
extern "C" void tch_extension_optim_squares_cpu(const OptimStep* params) noexcept;
TCH_EXTENSION_CPU_KERNEL(tch_extension_optim_squares, optim_squares, OptimStep,
                         tch_extension::chunks, tch_extension::chunks_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_optim_rewrite, optim_rewrite_chunks, OptimRewrite,
                         tch_extension::chunks, tch_extension::chunks_of_a_thread)

#if defined(CPU_CAPABILITY_DEFAULT)
extern "C" void tch_extension_optim_prepare_cpu(const OptimStep* params) noexcept {
  using namespace tch_extension::optim;
  const Totals totals = totals_of(*params);
  const bool skip = found_inf(*params, totals);
  for (int64_t index = 0; index < params->count; ++index) {
    prepare(*params, params->spans[index], totals, skip, params->coefficients + index);
  }
  report(*params, totals);
}

extern "C" void tch_extension_optim_scan_cpu(const OptimStep* params) noexcept {
  tch_extension_optim_squares_cpu(params);
  double squares = 0, infinite = 0;
  for (int64_t chunk = 0; chunk < params->chunks; ++chunk) {
    squares += params->partials[2 * chunk];
    infinite += params->partials[2 * chunk + 1];
  }
  params->totals[0] = squares;
  params->totals[1] = infinite;
  if (params->prepares != 0) tch_extension_optim_prepare_cpu(params);
}

extern "C" void tch_extension_optim_store_cpu(const OptimStore* params) noexcept {
  std::copy_n(params->values, params->count, params->to);
}
#endif
