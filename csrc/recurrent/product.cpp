#include "product.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include <optional>
#include <string_view>

#include "tch_extension/c_abi.h"

namespace tch_extension::recurrent {
namespace {

using Linear = at::Tensor(const at::Tensor& input, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, std::string_view activation,
                          c10::List<std::optional<at::Scalar>> scalars,
                          std::optional<std::string_view> algorithm);

// Null in a libtorch without oneDNN.
const std::optional<c10::TypedOperatorHandle<Linear>>& onednn_linear() {
  static const auto linear = [] {
    const auto found = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
    return found ? std::make_optional(found->typed<Linear>()) : std::nullopt;
  }();
  return linear;
}

// With fewer multiplications, copying the operands to oneDNN's order costs more than it saves.
constexpr double kWorthOneDnn = 1 << 24;

// On Intel's CPUs MKL is a twentieth faster.
bool is_intel() {
#if defined(__x86_64__) && defined(__GNUC__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

// A transposed left operand, as in the gradient of a weight, is what MKL reads in place. A copy of
// it for oneDNN takes half as long as the product.
bool is_for_onednn(const at::Tensor& lhs, const at::Tensor& rhs) {
  const double products = static_cast<double>(lhs.size(0)) * lhs.size(1) * rhs.size(1);
  return lhs.is_cpu() && lhs.scalar_type() == at::kFloat && lhs.stride(1) == 1 &&
         products >= kWorthOneDnn && !is_intel() && at::globalContext().userEnabledMkldnn() &&
         onednn_linear().has_value();
}

}  // namespace

at::Tensor product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* bias) {
  if (is_for_onednn(lhs, rhs)) {
    const auto added = bias == nullptr ? std::nullopt : std::make_optional(*bias);
    // The operands are made contiguous: for rows that are not, oneDNN takes a hundred times as
    // long.
    return onednn_linear()->call(lhs.contiguous(), rhs.t().contiguous(), added, "none",
                                 c10::List<std::optional<at::Scalar>>(), std::nullopt);
  }
  return bias == nullptr ? at::mm(lhs, rhs) : at::addmm(*bias, lhs, rhs);
}

}  // namespace tch_extension::recurrent

using namespace tch_extension;

// `bias` may be null.
TCH_EXTENSION_API Message tch_extension_recurrent_product(const at::Tensor* lhs,
                                                          const at::Tensor* rhs,
                                                          const at::Tensor* bias,
                                                          at::Tensor** result) {
  return guard([&] {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    *result = new at::Tensor(recurrent::product(*lhs, *rhs, bias));
  });
}
