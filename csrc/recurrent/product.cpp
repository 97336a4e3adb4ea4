#include "product.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string_view>

#include "libtorch.h"
#include "params.h"
#include "tch_extension/c_abi.h"

#ifdef TCH_EXTENSION_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#endif

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

// With fewer multiplications, or with fewer rows for each copied weight, copying the operands to
// oneDNN's order costs more than it saves.
constexpr double kWorthOneDnn = 1 << 24;
constexpr int64_t kRowsWorthOneDnn = 512;

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
         products >= kWorthOneDnn && lhs.size(0) >= kRowsWorthOneDnn && !is_intel() &&
         at::globalContext().userEnabledMkldnn() && onednn_linear().has_value();
}

}  // namespace

at::Tensor zeros_for(const at::Tensor& like, int64_t columns, int64_t rows) {
  constexpr int64_t kFewRows = 32;
  if (!like.is_cuda() || like.scalar_type() != at::kFloat || rows > kFewRows) return {};
  return at::zeros({columns}, like.options());
}

at::Tensor product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* bias) {
  if (is_for_onednn(lhs, rhs)) {
    const auto added = bias == nullptr ? std::nullopt : std::make_optional(*bias);
    // The operands are made contiguous: for rows that are not, oneDNN takes a hundred times as
    // long.
    return onednn_linear()->call(lhs.contiguous(), rhs.t().contiguous(), added, "none",
                                 c10::List<std::optional<at::Scalar>>(), std::nullopt);
  }
  const at::Tensor zeros = bias == nullptr ? zeros_for(lhs, rhs.size(1), lhs.size(0)) : *bias;
  return zeros.defined() ? at::addmm(zeros, lhs, rhs) : at::mm(lhs, rhs);
}

#ifdef TCH_EXTENSION_CUDA

namespace {

// A matrix as cuBLAS reads it, which is column by column: a row-major matrix is its own transpose
// there.
struct CublasOperand {
  explicit CublasOperand(const at::Tensor& of)
      : is_row_major(of.stride(1) == 1 && of.stride(0) >= of.size(1)),
        leading(of.stride(is_row_major ? 0 : 1)) {}
  // Whether a product that is computed as its own transpose reads this operand as it is.
  cublasOperation_t operation() const { return is_row_major ? CUBLAS_OP_N : CUBLAS_OP_T; }
  bool fits(const at::Tensor& of) const {
    return is_row_major || (of.stride(0) == 1 && of.stride(1) >= of.size(0));
  }

  bool is_row_major;
  int64_t leading;
};

}  // namespace

at::Tensor tf32_product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* to) {
  const CublasOperand left(lhs), right(rhs);
  const int64_t m = lhs.size(0), k = lhs.size(1), n = rhs.size(1);
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const bool counts = std::max({m, k, n, left.leading, right.leading}) <= kMost;
  const bool fits = counts && left.fits(lhs) && right.fits(rhs);
  if (!fits || m * n * k == 0) return to == nullptr ? at::mm(lhs, rhs) : to->addmm_(lhs, rhs);
  const c10::cuda::CUDAGuard guard(lhs.device());
  at::Tensor out = to == nullptr ? at::empty({m, n}, lhs.options()) : *to;
  const float one = 1, of_out = to == nullptr ? 0.0f : 1.0f;
  TORCH_CUDABLAS_CHECK(cublasGemmEx(
      at::cuda::getCurrentCUDABlasHandle(), right.operation(), left.operation(),
      static_cast<int>(n), static_cast<int>(m), static_cast<int>(k), &one, rhs.const_data_ptr(),
      CUDA_R_32F, static_cast<int>(right.leading), lhs.const_data_ptr(), CUDA_R_32F,
      static_cast<int>(left.leading), &of_out, out.mutable_data_ptr(), CUDA_R_32F,
      static_cast<int>(n), CUBLAS_COMPUTE_32F_FAST_TF32, CUBLAS_GEMM_DEFAULT));
  return out;
}

#else

at::Tensor tf32_product(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* to) {
  return to == nullptr ? at::mm(lhs, rhs) : to->addmm_(lhs, rhs);
}

#endif

}  // namespace tch_extension::recurrent

using namespace tch_extension;

// `bias` may be null.
TCH_EXTENSION_API Message tch_extension_recurrent_product(const at::Tensor* lhs,
                                                          const at::Tensor* rhs,
                                                          const at::Tensor* bias,
                                                          at::Tensor** result) {
  return guard([&] {
    const recurrent::PlainDispatch plain;
    *result = new at::Tensor(recurrent::product(*lhs, *rhs, bias));
  });
}

TCH_EXTENSION_API Message tch_extension_recurrent_tf32_product(const at::Tensor* lhs,
                                                               const at::Tensor* rhs,
                                                               const at::Tensor* to,
                                                               at::Tensor** result) {
  return guard([&] {
    const recurrent::PlainDispatch plain;
    *result = new at::Tensor(recurrent::tf32_product(*lhs, *rhs, to));
  });
}
