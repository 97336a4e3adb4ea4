// The CPU kernels. A row is computed by one thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "params.h"
#include "statistic.h"
#include "tch_extension/cpu_registers.h"
#include "tch_extension/kind.h"

namespace tch_extension::norm {
inline namespace CPU_CAPABILITY {
namespace {

// A thread gets at least this many elements, because waking one takes a few microseconds.
constexpr int64_t kElements = 4096;

inline int64_t grain_of(int64_t elements_per_item) {
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, elements_per_item));
}

template <typename Params>
int64_t rows_per_part(const Params& params) {
  return (params.rows + params.parts - 1) / params.parts;
}

// Without columns there is nothing to do, however many rows there are.
template <typename Params>
int64_t forward_items(const Params& params) {
  return params.columns == 0 ? 0 : params.rows;
}

template <typename Params>
int64_t forward_grain(const Params& params) {
  return grain_of(params.columns);
}

template <typename Params>
int64_t backward_items(const Params& params) {
  return params.columns == 0 ? 0 : params.parts;
}

template <typename Params>
int64_t backward_grain(const Params& params) {
  return grain_of(rows_per_part(params) * params.columns);
}

// Calls body(Type<T>{}, Type<W>{}) with the type T of the rows and the type W of weight and bias.
template <typename Params, typename Body>
void for_kinds(const Params& params, Body body) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if (params.parameter_kind == params.kind) return body(type, type);
    body(type, Type<Compute<T>>{});
  });
}

// The count of a whole vector. It is known at compile time, so no load or store is masked.
template <typename C>
using Whole = std::integral_constant<int64_t, Vec<C>::size()>;

// Sums over a row. term(column, count, sums) adds one vector's values to each of the sums. The row
// is summed in blocks, because a long running sum loses small terms, and in several independent
// vectors, because each addition waits for the previous one.
template <typename C, int kSums, typename Term>
inline TCH_EXTENSION_INLINE void row_sums(int64_t columns, C (&sums)[kSums], Term term) {
  using V = Vec<C>;
  constexpr int64_t kSize = V::size();
  constexpr int kLanes = 4;
  constexpr int64_t kBlock = 64 * kSize;
  const auto zero = [](auto) TCH_EXTENSION_INLINE { return V(C(0)); };
  auto totals = registers<V, kSums>(zero);
  for (int64_t first = 0; first < columns; first += kBlock) {
    const int64_t last = std::min(columns, first + kBlock);
    auto block = registers<V, kLanes * kSums>(zero);
    int64_t column = first;
    for (; column + kLanes * kSize <= last; column += kLanes * kSize) {
      unrolled<kLanes>([&](auto lane) TCH_EXTENSION_INLINE {
        term(column + lane * kSize, Whole<C>{}, &block[lane * kSums]);
      });
    }
    for (; column + kSize <= last; column += kSize) term(column, Whole<C>{}, &block[0]);
    if (column < last) term(column, last - column, &block[0]);
    unrolled<kSums>([&](auto sum) TCH_EXTENSION_INLINE {
      const V low = block[sum] + block[kSums + sum];
      totals[sum] = totals[sum] + (low + (block[2 * kSums + sum] + block[3 * kSums + sum]));
    });
  }
  for (int sum = 0; sum < kSums; ++sum) {
    sums[sum] = at::vec::vec_reduce_all<C>([](V& a, V& b) { return a + b; }, totals[sum]);
  }
}

// The first `count` values, followed by zeros.
template <typename C, typename Count>
inline Vec<C> only(const Vec<C>& values, Count count) {
  if constexpr (std::is_same_v<Count, Whole<C>>) {
    return values;
  } else {
    return Vec<C>::set(Vec<C>(0), values, count);
  }
}

// Writes value(column, count) for each vector of a row, rounded to the kind of `to`.
template <typename C, typename T, typename Value>
inline TCH_EXTENSION_INLINE void write_row(int64_t columns, T* to, Value value) {
  constexpr int64_t kSize = Vec<C>::size();
  int64_t column = 0;
  for (; column + 2 * kSize <= columns; column += 2 * kSize) {
    store_pair(value(column, Whole<C>{}), value(column + kSize, Whole<C>{}), to + column);
  }
  for (; column + kSize <= columns; column += kSize) {
    store(value(column, Whole<C>{}), to + column, Whole<C>{});
  }
  if (column < columns) store(value(column, columns - column), to + column, columns - column);
}

template <typename C>
struct Moments {
  C mean;        // rounded, or the row's first value if that is as near
  C correction;  // to be added to the mean
  C rstd;
};

// Returns the row's first value instead of the mean if the two differ by no more than rounding. The
// mean of a row of equal values is then exactly that value, unless its sum is so long that it
// rounds by more than this tolerance. Other rows lose nothing if their deviations are taken from
// their first value, because it is as near.
template <typename C>
C pivot(C mean, C first) {
  const bool is_near =
      std::abs(mean - first) <= C(32) * std::numeric_limits<C>::epsilon() * std::abs(first);
  return is_near ? first : mean;
}

// Computes the moments in two passes. The second one also finds the error of the rounded mean,
// which matters if the mean is large and the variance small.
template <typename Norm, typename T, typename C = Compute<T>>
Moments<C> moments(const T* x, int64_t columns, double eps) {
  using V = Vec<C>;
  // A power of two of at most 1 / N. Scaling by it rounds nothing, and the sum of the scaled values
  // cannot overflow if no value does.
  C scale(1);
  while (C(1) / scale < C(columns)) scale /= C(2);
  const C scaled_columns = C(columns) * scale;
  const V scales(scale);

  C mean(0);
  if constexpr (Norm::kCentred) {
    C first[1];
    row_sums(columns, first, [&](int64_t column, auto count, V* sums) TCH_EXTENSION_INLINE {
      sums[0] = at::vec::fmadd(load(x + column, count), scales, sums[0]);
    });
    mean = pivot(first[0] / scaled_columns, static_cast<C>(x[0]));
  }

  C second[2];
  row_sums(columns, second, [&](int64_t column, auto count, V* sums) TCH_EXTENSION_INLINE {
    const V centered = only(load(x + column, count) - V(mean), count);
    sums[0] = at::vec::fmadd(centered, scales, sums[0]);
    sums[1] = at::vec::fmadd(centered, centered, sums[1]);
  });
  const C correction = Norm::kCentred ? second[0] / scaled_columns : C(0);
  const C mean_square = second[1] / C(columns);
  // If the squares overflow, the correction's square may overflow, too, and their difference would
  // be NaN.
  const C variance = std::isinf(mean_square) ? mean_square : mean_square - correction * correction;
  // Not std::max, which would drop NaN.
  return {mean, correction, C(1) / std::sqrt((variance < C(0) ? C(0) : variance) + C(eps))};
}

template <typename W>
Vec<Compute<W>> load_or(const void* pointer, int64_t at, int64_t count, Compute<W> otherwise) {
  return pointer == nullptr ? Vec<Compute<W>>(otherwise)
                            : load(static_cast<const W*>(pointer) + at, count);
}

// Normalises the row x, keeps its moments and writes its output.
template <typename Norm, typename W, bool kAffine, typename Params, typename X, typename T>
void forward_row(const Params& params, int64_t row, const X* x, T* y) {
  using C = Compute<T>;
  using V = Vec<C>;
  const Moments<C> row_moments = moments<Norm>(x, params.columns, params.eps);
  const V mean(row_moments.mean), correction(row_moments.correction), rstd(row_moments.rstd);
  const auto value = [&](int64_t column, auto count) TCH_EXTENSION_INLINE {
    const V normal = (load(x + column, count) - mean - correction) * rstd;
    if constexpr (!kAffine) return normal;
    return at::vec::fmadd(normal, load_or<W>(params.weight, column, count, 1),
                          load_or<W>(params.bias, column, count, 0));
  };
  write_row<C>(params.columns, y, value);
  if (params.mean != nullptr) {
    static_cast<C*>(params.mean)[row] = row_moments.mean + row_moments.correction;
  }
  if (params.rstd != nullptr) static_cast<C*>(params.rstd)[row] = row_moments.rstd;
}

template <typename Norm, typename T, typename W, bool kAffine>
void forward(const NormForward& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(params.input) + row * params.columns;
    T* y = static_cast<T*>(params.output) + row * params.columns;
    forward_row<Norm, W, kAffine>(params, row, x, y);
  }
}

// The inputs of one row's derivative: x of type X, its output's gradient of T, the weight of W.
template <typename Norm, typename T, typename W, typename X = T>
struct Row {
  using C = Compute<T>;
  using V = Vec<C>;
  const T* grad;
  const X* x;
  const void* weight;
  V mean, rstd;

  template <typename Params>
  Row(const Params& params, const void* input, int64_t row)
      : grad(static_cast<const T*>(params.grad_output) + row * params.columns),
        x(static_cast<const X*>(input) + row * params.columns),
        weight(params.weight),
        mean(!Norm::kCentred || params.mean == nullptr ? C(0)
                                                       : static_cast<const C*>(params.mean)[row]),
        rstd(params.rstd == nullptr ? C(0) : static_cast<const C*>(params.rstd)[row]) {}

  template <typename Count>
  V output_grad(int64_t column, Count count) const {
    return load(grad + column, count);
  }
  // Zeros past the row's end, where mean · rstd may overflow, and infinity times 0 is NaN.
  template <typename Count>
  V normal(int64_t column, Count count) const {
    return only(normal_of<Norm>(load(x + column, count), mean, rstd), count);
  }
  template <typename Count>
  V scaled(const V& output_grad, int64_t column, Count count) const {
    return weight == nullptr ? output_grad
                             : output_grad * load(static_cast<const W*>(weight) + column, count);
  }
};

// Adds `values` to `to`.
template <typename C, typename Count>
inline void add(const Vec<C>& values, C* to, Count count) {
  store(load(to, count) + values, to, count);
}

// Computes one row's derivative, and what it adds to the sums over rows. write(value) is called for
// the derivative, where value(column, count) is a vector of it. The compiler knows which of these
// are wanted; usually all are, or only the row's derivative.
template <bool kInput, bool kParameters, typename Norm, typename T, typename W, typename X,
          typename C, typename Write>
inline TCH_EXTENSION_INLINE void backward_row(const Row<Norm, T, W, X>& row, int64_t columns,
                                              C inverse, C* weight_sums, C* bias_sums,
                                              Write write) {
  using V = Vec<C>;
  C sums[2];
  row_sums(columns, sums, [&](int64_t column, auto count, V* sums) TCH_EXTENSION_INLINE {
    // Past the row's end, the loaded gradient is zero, and so is every term.
    const V output_grad = row.output_grad(column, count);
    const V normal = row.normal(column, count);
    if constexpr (kInput) {
      const V grad = row.scaled(output_grad, column, count);
      sums[0] = sums[0] + grad;
      sums[1] = at::vec::fmadd(grad, normal, sums[1]);
    }
    if constexpr (kParameters) {
      if (weight_sums != nullptr) add(output_grad * normal, weight_sums + column, count);
      if (bias_sums != nullptr) add(output_grad, bias_sums + column, count);
    }
  });
  if constexpr (kInput) {
    const V mean_grad(sums[0] * inverse), mean_product(sums[1] * inverse);
    const auto value = [&](int64_t column, auto count) TCH_EXTENSION_INLINE {
      const V grad = row.scaled(row.output_grad(column, count), column, count);
      return input_gradient<Norm>(row.rstd, grad, mean_grad, row.normal(column, count),
                                  mean_product);
    };
    write(value);
  }
}

// Computes the rows of each part in turn. `write_of(row)` makes `write` of backward_row.
template <typename Norm, typename T, typename W, typename X, typename Params, typename WriteOf>
void backward_parts(const Params& params, const void* input, bool has_input_grad, int64_t begin,
                    int64_t end, WriteOf write_of) {
  using C = Compute<T>;
  const int64_t columns = params.columns;
  const int64_t rows_of_part = rows_per_part(params);
  // Computed once, because a division per row would slow down short rows.
  const C inverse = C(1) / C(columns);
  const auto of_part = [&](void* parts, int64_t part) {
    C* sums = parts == nullptr ? nullptr : static_cast<C*>(parts) + part * columns;
    if (sums != nullptr) std::fill_n(sums, columns, C(0));
    return sums;
  };
  for (int64_t part = begin; part < end; ++part) {
    C* weight_sums = of_part(params.weight_parts, part);
    C* bias_sums = of_part(params.bias_parts, part);
    const int64_t last = std::min(params.rows, (part + 1) * rows_of_part);
    for (int64_t index = part * rows_of_part; index < last; ++index) {
      const Row<Norm, T, W, X> row(params, input, index);
      const auto write = write_of(index);
      if (!has_input_grad) {
        backward_row<false, true>(row, columns, inverse, weight_sums, bias_sums, write);
      } else if (weight_sums == nullptr && bias_sums == nullptr) {
        backward_row<true, false>(row, columns, inverse, weight_sums, bias_sums, write);
      } else {
        backward_row<true, true>(row, columns, inverse, weight_sums, bias_sums, write);
      }
    }
  }
}

template <typename Norm, typename T, typename W>
void backward(const NormBackward& params, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const bool has_input_grad = params.grad_input != nullptr;
  backward_parts<Norm, T, W, T>(params, params.input, has_input_grad, begin, end, [&](int64_t row) {
    T* to = has_input_grad ? static_cast<T*>(params.grad_input) + row * params.columns : nullptr;
    return [to, columns = params.columns](const auto& value)
               TCH_EXTENSION_INLINE { write_row<C>(columns, to, value); };
  });
}

template <typename Norm>
void run_forward(const NormForward& params, int64_t begin, int64_t end) {
  for_kinds(params, [&](auto type, auto parameter) {
    using T = typename decltype(type)::type;
    using W = typename decltype(parameter)::type;
    const bool is_affine = params.weight != nullptr || params.bias != nullptr;
    is_affine ? forward<Norm, T, W, true>(params, begin, end)
              : forward<Norm, T, W, false>(params, begin, end);
  });
}

template <typename Norm>
void run_backward(const NormBackward& params, int64_t begin, int64_t end) {
  for_kinds(params, [&](auto type, auto parameter) {
    using T = typename decltype(type)::type;
    using W = typename decltype(parameter)::type;
    backward<Norm, T, W>(params, begin, end);
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::norm
