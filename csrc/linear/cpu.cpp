#include "linear.h"
#include "tch_extension/cpu_column_sums.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

int64_t items(const LinearBiasGrad& params) { return column_sums_items(params.sums); }

int64_t grain(const LinearBiasGrad& params) { return column_sums_grain(params.sums); }

int64_t finish_items(const LinearBiasGrad& params) { return finish_column_sums_items(params.sums); }

int64_t finish_grain(const LinearBiasGrad& params) { return finish_column_sums_grain(params.sums); }

}  // namespace

static void linear_bias_grad(const LinearBiasGrad& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    column_sums<T>(params.sums, begin, end, [&](int64_t row, int64_t column, int64_t count) {
      return load(static_cast<const T*>(params.grad) + row * params.row_stride + column, count);
    });
  });
}

static void linear_bias_grad_finish(const LinearBiasGrad& params, int64_t begin, int64_t end) {
  for_kind(params.kind, [&](auto type) {
    finish_column_sums<typename decltype(type)::type>(params.sums, begin, end);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_linear_bias_grad, linear_bias_grad, LinearBiasGrad, items,
                         grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_linear_bias_grad_finish, linear_bias_grad_finish,
                         LinearBiasGrad, finish_items, finish_grain)
