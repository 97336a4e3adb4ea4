#include "../recurrent/cells/vector_functions.h"
#include "mlp.h"
#include "tch_extension/cpu_column_sums.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

// A work item is a piece of the arrays, which are long.
constexpr int64_t kPiece = 1024;
// A thread gets at least this much work, as in libtorch, because waking it costs more.
constexpr int64_t kGrain = 32;

int64_t pieces(int64_t count) { return (count + kPiece - 1) / kPiece; }

int64_t elements(const MlpDifferentiate& params) { return params.sums.rows * params.sums.columns; }

int64_t items(const MlpActivate& params) { return pieces(params.count); }
int64_t items(const MlpGate& params) { return pieces(params.count); }
int64_t items(const MlpGateBackward& params) { return pieces(params.count); }
int64_t items(const MlpDifferentiate& params) {
  return params.sums.sums == nullptr ? pieces(elements(params)) : column_sums_items(params.sums);
}

int64_t grain(const MlpActivate&) { return kGrain; }
int64_t grain(const MlpGate&) { return kGrain; }
int64_t grain(const MlpGateBackward&) { return kGrain; }
int64_t grain(const MlpDifferentiate& params) {
  return params.sums.sums == nullptr ? kGrain : column_sums_grain(params.sums);
}

int64_t finish_items(const MlpDifferentiate& params) {
  return finish_column_sums_items(params.sums);
}
int64_t finish_grain(const MlpDifferentiate& params) {
  return finish_column_sums_grain(params.sums);
}

// An activation and its derivative.
template <typename C>
struct Slope {
  Vec<C> value;
  Vec<C> derivative;
};

// s = 1 / (1 + exp(-x)) and its derivative s (1 - s), both to the last digits where s is near 0
// or 1.
template <typename C>
Slope<C> logistic(const Vec<C>& x) {
  const Vec<C> one(C(1)), e = exp<C>(x.abs().neg()), r = one / (one + e), small = e * r;
  return {Vec<C>::blendv(r, small, x < Vec<C>(C(0))), small * r};
}

struct Silu {
  template <typename C>
  static Slope<C> slope(const Vec<C>& x) {
    const Slope<C> s = logistic<C>(x);
    return {x * s.value, s.value + x * s.derivative};
  }
};

// (1 + tanh(v)) / 2 is s(2 v), which keeps its digits where tanh is near -1.
struct GeluTanh {
  template <typename C>
  static Slope<C> slope(const Vec<C>& x) {
    constexpr C kTwice = C(2 * 0.79788456080286535588), kCubic = C(0.044715);  // 2 √(2 / π)
    const Vec<C> one(C(1)), twice(kTwice), square = x * x;
    const Slope<C> s = logistic<C>(twice * x * (one + Vec<C>(kCubic) * square));
    const Vec<C> inner = twice * (one + Vec<C>(C(3) * kCubic) * square);
    return {x * s.value, s.value + x * s.derivative * inner};
  }
};

// Φ(x) = (1 + erf(x / √2)) / 2.
template <typename C>
Vec<C> normal_share(const Vec<C>& x) {
  constexpr C kRootOfHalf = C(0.70710678118654752440);
  const Vec<C> half(C(0.5)), one(C(1)), v = x * Vec<C>(kRootOfHalf);
  if constexpr (std::is_same_v<C, float>) {
    // libtorch's erf of float vectors is off by 1e-6. Near 0 this is v plus v times a polynomial of
    // v². Beyond, erfc(t) of t = |v| is the exponential of a polynomial of t, which keeps its
    // digits where erf is near -1. Either is off by about one unit in the last place of erf.
    using at::vec::fmadd;
    const Vec<C> t = v.abs(), square = v * v;
    Vec<C> near(-5.96761703e-4f);
    for (const float term :
         {4.99119423e-3f, -2.67681349e-2f, 1.12819925e-1f, -3.76125336e-1f, 1.28379166e-1f}) {
      near = fmadd(near, square, Vec<C>(term));
    }
    near = fmadd(near, v, v);
    Vec<C> far(-1.72853470e-5f);
    for (const float term : {3.83197126e-4f, -3.88396438e-3f, 2.42546219e-2f, -1.06777877e-1f,
                             -6.34846687e-1f, -1.28717512e-1f}) {
      far = fmadd(far, t, Vec<C>(term));
    }
    const Vec<C> beyond = half * exp<C>(far * t - t);
    const Vec<C> tail = Vec<C>::blendv(one - beyond, beyond, x < Vec<C>(0.0f));
    return Vec<C>::blendv(half + half * near, tail, t > Vec<C>(0.927734375f));
  } else {
    return half * (one + v.erf());
  }
}

struct Gelu {
  template <typename C>
  static Slope<C> slope(const Vec<C>& x) {
    constexpr C kDensityAt0 = C(0.39894228040143267794);
    const Vec<C> share = normal_share<C>(x);
    return {x * share, share + x * Vec<C>(kDensityAt0) * exp<C>(Vec<C>(C(-0.5)) * x * x)};
  }
};

struct ReluSquared {
  template <typename C>
  static Vec<C> positive(const Vec<C>& x) {
    const Vec<C> zero(C(0));
    // max would not keep NaN.
    return Vec<C>::blendv(x, zero, x <= zero);
  }
  template <typename C>
  static Slope<C> slope(const Vec<C>& x) {
    const Vec<C> kept = positive<C>(x);
    return {kept * kept, kept + kept};
  }
};

// The value alone. That of Gelu is computed without the exponential of its derivative, because the
// compiler keeps a call of libtorch's exponential, in Double, even if nobody needs its result.
template <typename Activation, typename C>
Vec<C> value(const Vec<C>& x) {
  if constexpr (std::is_same_v<Activation, Gelu>) {
    return x * normal_share<C>(x);
  } else {
    return Activation::template slope<C>(x).value;
  }
}

// The gradient of z, given that of a.
template <typename Activation, typename C>
Vec<C> times(const Vec<C>& grad, const Vec<C>& x, const Slope<C>& slope) {
  const Vec<C> product = grad * slope.derivative;
  if constexpr (!std::is_same_v<Activation, ReluSquared>) {
    return product;
  } else {
    // It is selected, because NaN or infinity times 0 is NaN.
    const Vec<C> zero(C(0));
    return Vec<C>::blendv(product, zero, x <= zero);
  }
}

template <typename Body>
void for_activation(MlpActivation activation, Body&& body) {
  switch (activation) {
    case MlpActivation::GeluTanh:
      return body(GeluTanh{});
    case MlpActivation::Gelu:
      return body(Gelu{});
    case MlpActivation::ReluSquared:
      return body(ReluSquared{});
    case MlpActivation::Silu:
      return body(Silu{});
  }
}

// Calls body(at, count) for each vector of the pieces [begin, end).
template <typename T, typename Body>
void for_vectors(int64_t all, int64_t begin, int64_t end, Body&& body) {
  const int64_t last = std::min(all, end * kPiece);
  for (int64_t at = begin * kPiece; at < last; at += kVecSize<T>) {
    body(at, std::min(kVecSize<T>, last - at));
  }
}

template <typename T, typename Activation>
void activate(const MlpActivate& params, int64_t begin, int64_t end) {
  const T* input = static_cast<const T*>(params.input);
  T* output = static_cast<T*>(params.output);
  for_vectors<T>(params.count, begin, end, [&](int64_t at, int64_t count) {
    store(value<Activation, Compute<T>>(load(input + at, count)), output + at, count);
  });
}

template <typename T, typename Activation>
Vec<Compute<T>> differentiate(const MlpDifferentiate& params, int64_t at, int64_t count) {
  using C = Compute<T>;
  const Vec<C> grad = load(static_cast<const T*>(params.grad) + at, count);
  const Vec<C> x = load(static_cast<const T*>(params.input) + at, count);
  const Slope<C> slope = Activation::template slope<C>(x);
  const Vec<C> grad_input = times<Activation, C>(grad, x, slope);
  store(grad_input, static_cast<T*>(params.grad_input) + at, count);
  if (params.output != nullptr) store(slope.value, static_cast<T*>(params.output) + at, count);
  return grad_input;
}

template <typename T, typename Activation>
void differentiate_all(const MlpDifferentiate& params, int64_t begin, int64_t end) {
  if (params.sums.sums == nullptr) {
    return for_vectors<T>(elements(params), begin, end, [&](int64_t at, int64_t count) {
      differentiate<T, Activation>(params, at, count);
    });
  }
  column_sums<T>(params.sums, begin, end, [&](int64_t row, int64_t column, int64_t count) {
    return differentiate<T, Activation>(params, row * params.sums.columns + column, count);
  });
}

template <typename T>
void gate(const MlpGate& params, int64_t begin, int64_t end) {
  const T* gates = static_cast<const T*>(params.gate);
  const T* ups = static_cast<const T*>(params.up);
  T* output = static_cast<T*>(params.output);
  for_vectors<T>(params.count, begin, end, [&](int64_t at, int64_t count) {
    const auto silu = value<Silu, Compute<T>>(load(gates + at, count));
    store(silu * load(ups + at, count), output + at, count);
  });
}

template <typename T>
void gate_backward(const MlpGateBackward& params, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const T* grads = static_cast<const T*>(params.grad);
  const T* gates = static_cast<const T*>(params.gate);
  const T* ups = static_cast<const T*>(params.up);
  T* grad_gate = static_cast<T*>(params.grad_gate);
  T* grad_up = static_cast<T*>(params.grad_up);
  T* output = static_cast<T*>(params.output);
  for_vectors<T>(params.count, begin, end, [&](int64_t at, int64_t count) {
    // All are read before one is written, because dg or du may be in the place of dh.
    const Vec<C> grad = load(grads + at, count), up = load(ups + at, count);
    const Slope<C> slope = Silu::slope<C>(load(gates + at, count));
    store(grad * up * slope.derivative, grad_gate + at, count);
    store(grad * slope.value, grad_up + at, count);
    if (output != nullptr) store(slope.value * up, output + at, count);
  });
}

}  // namespace

static void mlp_activate(const MlpActivate& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    for_activation(params.activation, [&](auto activation) {
      activate<typename decltype(type)::type, decltype(activation)>(params, begin, end);
    });
  });
}

static void mlp_differentiate(const MlpDifferentiate& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    for_activation(params.activation, [&](auto activation) {
      differentiate_all<typename decltype(type)::type, decltype(activation)>(params, begin, end);
    });
  });
}

static void mlp_differentiate_finish(const MlpDifferentiate& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    finish_column_sums<typename decltype(type)::type>(params.sums, begin, end);
  });
}

static void mlp_gate(const MlpGate& params, int64_t begin, int64_t end) {
  for_kind(params.kind,
           [&](auto type) { gate<typename decltype(type)::type>(params, begin, end); });
}

static void mlp_gate_backward(const MlpGateBackward& params, int64_t begin, int64_t end) {
  for_kind(params.kind,
           [&](auto type) { gate_backward<typename decltype(type)::type>(params, begin, end); });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_mlp_activate, mlp_activate, MlpActivate, items, grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_mlp_differentiate, mlp_differentiate, MlpDifferentiate,
                         items, grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_mlp_differentiate_finish, mlp_differentiate_finish,
                         MlpDifferentiate, finish_items, finish_grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_mlp_gate, mlp_gate, MlpGate, items, grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_mlp_gate_backward, mlp_gate_backward, MlpGateBackward, items,
                         grain)
