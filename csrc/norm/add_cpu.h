// Rows that are sums, on the CPU: h = x + residual and y = norm(h), and their derivatives. A row of
// h is normalised while it is in the cache.
#pragma once

#include "cpu.h"

namespace tch_extension::norm {
inline namespace CPU_CAPABILITY {
namespace {

// Calls body(Type<T>{}, Type<S>{}, Type<W>{}) with the type T of the branch, S of the residual
// stream and W of weight and bias.
template <typename Params, typename Body>
void for_kinds_of_sum(const Params& params, Body body) {
  for_kinds(params, [&](auto type, auto parameter) {
    using T = typename decltype(type)::type;
    if (params.stream_kind == params.kind) return body(type, type, parameter);
    if constexpr (!std::is_same_v<T, Compute<T>>) {
      const Type<Compute<T>> compute;
      body(type, compute, compute);
    }
  });
}

template <typename Norm, typename T, typename S, typename W, bool kAffine>
void add_forward(const NormAddForward& params, int64_t begin, int64_t end) {
  using C = Compute<T>;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * params.columns;
    const T* x = static_cast<const T*>(params.input) + at;
    const S* residual = static_cast<const S*>(params.residual) + at;
    S* sum = static_cast<S*>(params.sum) + at;
    const auto value = [&](int64_t column, auto count) TCH_EXTENSION_INLINE {
      return load(x + column, count) + load(residual + column, count);
    };
    write_row<C>(params.columns, sum, value);
    forward_row<Norm, W, kAffine>(params, row, static_cast<const S*>(sum),
                                  static_cast<T*>(params.output) + at);
  }
}

template <typename Norm, typename T, typename S, typename W>
void add_backward(const NormAddBackward& params, int64_t begin, int64_t end) {
  using C = Compute<T>;
  const int64_t columns = params.columns;
  const auto row_of = [&](auto* array, int64_t row) {
    return array == nullptr ? array : array + row * columns;
  };
  auto* of_residual = static_cast<S*>(params.grad_residual);
  auto* of_input = static_cast<T*>(params.grad_input);
  const auto* of_sum = static_cast<const S*>(params.grad_sum);
  const bool has_grad = of_residual != nullptr || of_input != nullptr;
  backward_parts<Norm, T, W, S>(params, params.sum, has_grad, begin, end, [&](int64_t row) {
    S* to_residual = row_of(of_residual, row);
    T* to_input = row_of(of_input, row);
    const S* grad_sum = row_of(of_sum, row);
    return [=](const auto& value) TCH_EXTENSION_INLINE {
      const auto total = [&](int64_t column, auto count) TCH_EXTENSION_INLINE {
        const auto of_norm = value(column, count);
        return grad_sum == nullptr ? of_norm : of_norm + load(grad_sum + column, count);
      };
      if (to_residual != nullptr) write_row<C>(columns, to_residual, total);
      if (to_input != nullptr) write_row<C>(columns, to_input, total);
    };
  });
}

template <typename Norm>
void run_add_forward(const NormAddForward& params, int64_t begin, int64_t end) {
  for_kinds_of_sum(params, [&](auto type, auto stream, auto parameter) {
    using T = typename decltype(type)::type;
    using S = typename decltype(stream)::type;
    using W = typename decltype(parameter)::type;
    const bool is_affine = params.weight != nullptr || params.bias != nullptr;
    is_affine ? add_forward<Norm, T, S, W, true>(params, begin, end)
              : add_forward<Norm, T, S, W, false>(params, begin, end);
  });
}

template <typename Norm>
void run_add_backward(const NormAddBackward& params, int64_t begin, int64_t end) {
  for_kinds_of_sum(params, [&](auto type, auto stream, auto parameter) {
    using T = typename decltype(type)::type;
    using S = typename decltype(stream)::type;
    using W = typename decltype(parameter)::type;
    add_backward<Norm, T, S, W>(params, begin, end);
  });
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::norm
