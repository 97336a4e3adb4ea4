// From tensors to a product: which tensors are supported, how they broadcast, and what the plan
// asks about the product.
#ifdef TCH_EXTENSION_CUDA

#include "product.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>

#include "padded_product.h"
#include "params.h"
#include "plan.h"
#include "tch_extension/c_abi.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {
namespace {

using Way = GemmWay;

// The data, sizes and strides of a tensor or of a view of it.
struct View {
  const void* data = nullptr;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;

  int64_t dim() const { return static_cast<int64_t>(sizes.size()); }
};

View view(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.sizes(), tensor.strides()};
}

// Whether the tensor is a non-empty strided CUDA tensor with the device and kind of lhs, and its
// values are in memory without a pending negation or conjugation.
bool takes_part(const at::Tensor& tensor, const at::Tensor& lhs) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_nested() &&
         tensor.has_storage() && tensor.is_cuda() && tensor.device() == lhs.device() &&
         tensor.scalar_type() == lhs.scalar_type() && !tensor.is_neg() && !tensor.is_conj() &&
         !tensor._is_zerotensor() && tensor.numel() > 0;
}

bool has_kernels(at::ScalarType kind) {
  return kind == at::kFloat || kind == at::kHalf || kind == at::kBFloat16 || kind == at::kDouble;
}

// The size and stride of a dimension, counted from the last. A missing dimension and one of size 1
// have size 1 and stride 0.
struct Dim {
  int64_t size;
  int64_t stride;
};

Dim dim_at(const View& view, int64_t from_last) {
  const int64_t at = view.dim() - 1 - from_last;
  if (at < 0 || view.sizes[at] == 1) return {1, 0};
  return {view.sizes[at], view.strides[at]};
}

// Merges all dimensions before the last two into one. False if the operands do not broadcast, or if
// the strides of one cannot be merged.
bool merge_batch(const View& lhs, const View& rhs, const View& bias, Product& product) {
  const int64_t dims = std::max(lhs.dim(), rhs.dim());
  product.batch = 1;
  for (int64_t at = 2; at < dims; ++at) {
    const std::array<Dim, 3> operands{dim_at(lhs, at), dim_at(rhs, at), dim_at(bias, at)};
    const int64_t size = std::max(operands[0].size, operands[1].size);
    for (const Dim& operand : operands) {
      if (operand.size != 1 && operand.size != size) return false;
    }
    if (size == 1) continue;
    const std::array<int64_t*, 3> strides{&product.lhs.batch, &product.rhs.batch,
                                          &product.bias.batch};
    for (size_t i = 0; i < operands.size(); ++i) {
      if (product.batch == 1) {
        *strides[i] = operands[i].stride;
      } else if (operands[i].stride != *strides[i] * product.batch) {
        return false;
      }
    }
    product.batch *= size;
  }
  return true;
}

// Makes one matrix of the rows of the whole batch, if all of them multiply the same rhs and the
// strides allow it.
void merge_rows(Product& product) {
  if (product.batch == 1 || product.rhs.batch != 0) return;
  const auto goes_on = [&](const Matrices& operand) {
    return product.m == 1 || operand.batch == operand.row * product.m;
  };
  if (!goes_on(product.lhs) || (product.bias.data != nullptr && !goes_on(product.bias))) return;
  if (product.m == 1) {
    product.lhs.row = product.lhs.batch;
    product.bias.row = product.bias.batch;
  }
  product.m *= product.batch;
  product.batch = 1;
  product.lhs.batch = product.bias.batch = 0;
}

// Describes the product. False if the operands do not fit together, or their layouts are not
// supported here.
bool fit(const View& lhs, const View& rhs, const View& bias, Product& product) {
  if (lhs.dim() < 2 || rhs.dim() < 2 || bias.dim() > std::max(lhs.dim(), rhs.dim())) return false;
  product.m = lhs.sizes[lhs.dim() - 2];
  product.k = lhs.sizes[lhs.dim() - 1];
  product.n = rhs.sizes[rhs.dim() - 1];
  if (rhs.sizes[rhs.dim() - 2] != product.k) return false;
  const Dim bias_row = dim_at(bias, 1);
  const Dim bias_column = dim_at(bias, 0);
  if (bias_row.size != 1 && bias_row.size != product.m) return false;
  if (bias_column.size != 1 && bias_column.size != product.n) return false;
  product.lhs = {lhs.data, dim_at(lhs, 1).stride, dim_at(lhs, 0).stride, 0};
  product.rhs = {rhs.data, dim_at(rhs, 1).stride, dim_at(rhs, 0).stride, 0};
  product.bias = {bias.data, bias_row.stride, bias_column.stride, 0};
  if (!merge_batch(lhs, rhs, bias, product)) return false;
  merge_rows(product);
  constexpr int64_t kMost = INT32_MAX;
  return product.m <= kMost && product.n <= kMost && product.k <= kMost && product.batch <= kMost;
}

bool run_hopper(const Product& product, cudaStream_t stream) {
  bool is_started = false;
  return started(tch_extension_gemm_hopper_cuda(&product, &is_started, stream)) && is_started;
}

// Computes the product and the bias with a plan, and the ReLU with a kernel after it.
bool run_with_a_pass(Product product, c10::cuda::CUDAStream stream) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = product;
  const GemmFinishProduct finish{out, out, batch, m, n, m, n, kind, relu};
  product.relu = 0;
  return run_plan(product, stream.device_index(), stream.stream()) &&
         started(tch_extension_gemm_finish_product_cuda(&finish, stream.stream()));
}

// Whether a way that was forced exists for this product. The plan asks for itself.
bool can(const Product& product, Way way) {
  GemmSkinny skinny;
  switch (way) {
    case Way::Small:
      return tch_extension_gemm_small_can_cuda(&product);
    case Way::Hopper:
      return tch_extension_gemm_hopper_can_cuda(&product);
    case Way::Skinny:
      return tch_extension_gemm_skinny_facts_cuda(&product, &skinny);
    case Way::Padded:
      return padding_facts(product).has_value();
    default:
      return true;
  }
}

// False if cuBLASLt or the driver refuses the product, or it is left to libtorch.
bool run(const Product& product, Way way, c10::cuda::CUDAStream stream) {
  switch (way) {
    case Way::Small:
      return started(tch_extension_gemm_small_cuda(&product, stream.stream()));
    case Way::Hopper:
      return run_hopper(product, stream.stream());
    case Way::Plan:
      return run_plan(product, stream.device_index(), stream.stream());
    case Way::Skinny:
      return started(tch_extension_gemm_skinny_cuda(&product, stream.stream()));
    case Way::Padded:
      return padded_product(product, stream.device_index(), stream.stream());
    case Way::Pass:
      return run_with_a_pass(product, stream);
    case Way::Composite:
    case Way::Automatic:
      return false;
  }
  return false;
}

// The shape of the output: the broadcast leading dimensions, then M and N.
c10::SmallVector<int64_t, 6> output_size(const View& lhs, const View& rhs) {
  c10::SmallVector<int64_t, 6> size;
  for (int64_t at = std::max(lhs.dim(), rhs.dim()) - 1; at >= 2; --at) {
    size.push_back(std::max(dim_at(lhs, at).size, dim_at(rhs, at).size));
  }
  size.push_back(lhs.sizes[lhs.dim() - 2]);
  size.push_back(rhs.sizes[rhs.dim() - 1]);
  return size;
}

// The plan of src/ops/gemm/plan.rs.
using Choose = Way (*)(const Product*);

// An undefined tensor if the product cannot be computed here.
at::Tensor compute(const at::Tensor& like, const View& lhs, const View& rhs, const View& bias,
                   c10::IntArrayRef size, bool relu, Way way, Choose choose) {
  Product product{};
  if (!fit(lhs, rhs, bias, product)) return {};
  product.kind = static_cast<int32_t>(like.scalar_type());
  product.relu = relu;
  const c10::cuda::OptionalCUDAGuard device_guard(like.device());
  // Allocated without the dispatcher, which would take a tenth of the call's time.
  at::Tensor out(at::detail::empty_cuda(size, like.scalar_type(), like.device(), std::nullopt));
  product.out = out.mutable_data_ptr();
  if (way == Way::Automatic) {
    way = choose(&product);
  } else if (!can(product, way)) {
    return {};
  }
  return run(product, way, c10::cuda::getCurrentCUDAStream(like.device().index())) ? out
                                                                                   : at::Tensor();
}

// Whether libtorch was told to leave some multiprocessors to other kernels (the SM carveout). That
// is honoured by falling back to libtorch.
bool is_restricted() { return at::globalContext()._SMCarveout_EXPERIMENTAL().has_value(); }

// gelu(z), and z itself if it is wanted; both undefined if cuBLASLt does not have this epilogue.
struct WithZ {
  at::Tensor out;
  at::Tensor z;
};

WithZ compute_gelu(const at::Tensor& input, const View& weight, const View& bias, bool wants_z) {
  Product product{};
  if (!fit(view(input), weight, bias, product)) return {};
  product.kind = static_cast<int32_t>(input.scalar_type());
  const c10::cuda::OptionalCUDAGuard device_guard(input.device());
  const auto empty = [&] {
    return at::Tensor(at::detail::empty_cuda({product.m, product.n}, input.scalar_type(),
                                             input.device(), std::nullopt));
  };
  WithZ result{empty(), {}};
  product.out = result.out.mutable_data_ptr();
  Epilogue epilogue{true};
  if (wants_z) {
    result.z = empty();
    epilogue.z = result.z.mutable_data_ptr();
  }
  const auto stream = c10::cuda::getCurrentCUDAStream(input.device().index());
  return run_plan(product, stream.device_index(), stream.stream(), epilogue) ? result : WithZ{};
}

void hand_over(at::Tensor&& out, at::Tensor** result) {
  *result = out.defined() ? new at::Tensor(std::move(out)) : nullptr;
}

}  // namespace
}  // namespace tch_extension::gemm

using namespace tch_extension;
using namespace tch_extension::gemm;

// relu(lhs rhs + bias). There is neither a result nor a message if it has to be computed in another
// way. That includes wrong arguments, which the fallback reports.
TCH_EXTENSION_API Message tch_extension_gemm_matmul_add_relu(const at::Tensor* lhs,
                                                             const at::Tensor* rhs,
                                                             const at::Tensor* bias, GemmWay way,
                                                             Choose choose, at::Tensor** result) {
  return guard([&] {
    *result = nullptr;
    if (!takes_part(*lhs, *lhs) || !has_kernels(lhs->scalar_type()) || !takes_part(*rhs, *lhs) ||
        !takes_part(*bias, *lhs) || lhs->dim() < 2 || rhs->dim() < 2 || is_restricted()) {
      return;
    }
    const View left = view(*lhs);
    const View right = view(*rhs);
    const auto size = output_size(left, right);
    hand_over(compute(*lhs, left, right, view(*bias), size, true, way, choose), result);
  });
}

// input weightᵀ + bias, with the leading dimensions of the input. `bias` may be null. The result is
// as above.
TCH_EXTENSION_API Message tch_extension_gemm_linear(const at::Tensor* input,
                                                    const at::Tensor* weight,
                                                    const at::Tensor* bias, GemmWay way,
                                                    Choose choose, at::Tensor** result) {
  return guard([&] {
    *result = nullptr;
    if (!takes_part(*input, *input) || !has_kernels(input->scalar_type()) ||
        !takes_part(*weight, *input) || (bias != nullptr && !takes_part(*bias, *input)) ||
        input->dim() < 1 || weight->dim() != 2 || is_restricted()) {
      return;
    }
    if (bias != nullptr && (bias->dim() != 1 || bias->size(0) != weight->size(0))) return;
    const std::array<int64_t, 2> sizes{weight->size(1), weight->size(0)};
    const std::array<int64_t, 2> strides{weight->stride(1), weight->stride(0)};
    const View right{weight->const_data_ptr(), sizes, strides};
    View left = view(*input);
    const std::array<int64_t, 2> one_row{1, input->size(-1)};
    const std::array<int64_t, 2> row_strides{0, input->stride(-1)};
    if (input->dim() == 1) left = {left.data, one_row, row_strides};
    c10::SmallVector<int64_t, 6> size(input->sizes().begin(), input->sizes().end());
    size.back() = sizes[1];
    const View added = bias == nullptr ? View{} : view(*bias);
    hand_over(compute(*input, left, right, added, size, false, way, choose), result);
  });
}

// lhs rhs, for matrices or batches of them. The result is as above, and there is none if libtorch's
// product is faster.
TCH_EXTENSION_API Message tch_extension_gemm_product(const at::Tensor* lhs, const at::Tensor* rhs,
                                                     GemmWay way, Choose choose,
                                                     at::Tensor** result) {
  return guard([&] {
    *result = nullptr;
    if (!takes_part(*lhs, *lhs) || !has_kernels(lhs->scalar_type()) || !takes_part(*rhs, *lhs) ||
        lhs->dim() < 2 || rhs->dim() < 2 || is_restricted()) {
      return;
    }
    const View left = view(*lhs);
    const View right = view(*rhs);
    // Without a bias, libtorch's product does the same as our plan.
    if (way == Way::Plan || way == Way::Hopper || way == Way::Pass) return;
    hand_over(compute(*lhs, left, right, {}, output_size(left, right), false, way, choose), result);
  });
}

// gelu(z) of z = input weightᵀ + bias, with tanh, of matrices, and z itself if it is wanted. `bias`
// may be null. The results are as above, and there are none unless one call of cuBLASLt has both.
TCH_EXTENSION_API Message tch_extension_gemm_linear_gelu(const at::Tensor* input,
                                                         const at::Tensor* weight,
                                                         const at::Tensor* bias, bool wants_z,
                                                         at::Tensor** result, at::Tensor** z) {
  return guard([&] {
    *result = *z = nullptr;
    if (!takes_part(*input, *input) || !takes_part(*weight, *input) || input->dim() != 2 ||
        weight->dim() != 2 ||
        (bias != nullptr && (!takes_part(*bias, *input) || bias->dim() != 1)) || is_restricted()) {
      return;
    }
    const std::array<int64_t, 2> sizes{weight->size(1), weight->size(0)};
    const std::array<int64_t, 2> strides{weight->stride(1), weight->stride(0)};
    const View right{weight->const_data_ptr(), sizes, strides};
    auto found = compute_gelu(*input, right, bias == nullptr ? View{} : view(*bias), wants_z);
    hand_over(std::move(found.out), result);
    hand_over(std::move(found.z), z);
  });
}

// What src/ops/gemm/plan.rs asks about a product, besides what it asks the kernels; see its trait
// `Facts`. Neither throws, because C++ has called Rust here.
TCH_EXTENSION_API bool tch_extension_gemm_allows_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

TCH_EXTENSION_API bool tch_extension_gemm_padding(const GemmProduct* product, GemmPadding* result) {
  const auto facts = padding_facts(*product);
  if (facts) *result = *facts;
  return facts.has_value();
}

// For tests and benchmarks: the counters of this thread's cache of plans.
TCH_EXTENSION_API void tch_extension_gemm_counters(GemmCounters* result) { *result = counters(); }

#endif  // TCH_EXTENSION_CUDA
