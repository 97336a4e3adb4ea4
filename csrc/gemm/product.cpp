// From tensors to a product: which tensors are supported, how they broadcast, what each way can do
// with the product, and the way that src/ops/gemm chose.
#ifdef TCH_EXTENSION_CUDA

#include "product.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <optional>
#include <vector>

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

// Whether libtorch was told to leave some multiprocessors to other kernels (the SM carveout). That
// is honoured by falling back to libtorch.
bool is_restricted() { return at::globalContext()._SMCarveout_EXPERIMENTAL().has_value(); }

bool allows_tf32() {
  return at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
         at::Float32Precision::TF32;
}

// The arguments as matrices or batches of them: lhs rhs + bias.
struct Operands {
  View lhs;
  View rhs;
  View bias;
};

// The shape of the output: the broadcast leading dimensions, then M and N. False if there are too
// many dimensions.
bool set_size(const Operands& of, GemmDescription& result) {
  const int64_t dims = std::max(of.lhs.dim(), of.rhs.dim());
  if (dims > static_cast<int64_t>(std::size(result.size))) return false;
  for (int64_t at = 2; at < dims; ++at) {
    result.size[dims - 1 - at] = std::max(dim_at(of.lhs, at).size, dim_at(of.rhs, at).size);
  }
  result.size[dims - 2] = of.lhs.sizes[of.lhs.dim() - 2];
  result.size[dims - 1] = of.rhs.sizes[of.rhs.dim() - 1];
  result.dims = static_cast<int32_t>(dims);
  return true;
}

// False if the operands do not fit together, or their layouts are not supported here.
bool describe(const Operands& of, const at::Tensor& like, bool relu, GemmDescription& result) {
  Product& product = result.product;
  if (!fit(of.lhs, of.rhs, of.bias, product) || !set_size(of, result)) return false;
  product.kind = static_cast<int32_t>(like.scalar_type());
  product.relu = relu;
  result.device = like.device().index();
  const c10::cuda::OptionalCUDAGuard device_guard(like.device());
  result.tf32 = allows_tf32();
  result.small = tch_extension_gemm_small_can_cuda(&product);
  result.hopper = tch_extension_gemm_hopper_can_cuda(&product);
  // Where it cannot, its facts stay zero.
  tch_extension_gemm_skinny_facts_cuda(&product, &result.skinny);
  result.padding = padding_facts(product).value_or(GemmPadding{});
  return true;
}

bool describe_matmul(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor* bias,
                     bool relu, GemmDescription& result) {
  if (lhs.dim() < 2 || rhs.dim() < 2) return false;
  return describe({view(lhs), view(rhs), bias == nullptr ? View{} : view(*bias)}, lhs, relu,
                  result);
}

bool describe_linear(const at::Tensor& input, const at::Tensor& weight, const at::Tensor* bias,
                     bool relu, GemmDescription& result) {
  if (input.dim() < 1 || weight.dim() != 2 ||
      (bias != nullptr && (bias->dim() != 1 || bias->size(0) != weight.size(0)))) {
    return false;
  }
  const std::array<int64_t, 2> sizes{weight.size(1), weight.size(0)};
  const std::array<int64_t, 2> strides{weight.stride(1), weight.stride(0)};
  Operands of{view(input),
              {weight.const_data_ptr(), sizes, strides},
              bias == nullptr ? View{} : view(*bias)};
  const std::array<int64_t, 2> one_row{1, input.size(-1)};
  const std::array<int64_t, 2> row_strides{0, input.stride(-1)};
  const bool is_row = input.dim() == 1;
  if (is_row) of.lhs = {of.lhs.data, one_row, row_strides};
  if (!describe(of, input, relu, result)) return false;
  if (is_row) {
    result.size[0] = result.size[1];
    result.dims = 1;
  }
  return true;
}

at::Tensor empty_output(const GemmDescription& described) {
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(described.device));
  const c10::IntArrayRef size(described.size, static_cast<size_t>(described.dims));
  // Without the dispatcher, which would take a tenth of the call's time.
  return at::Tensor(at::detail::empty_cuda(
      size, static_cast<at::ScalarType>(described.product.kind), device, std::nullopt));
}

void hand_over(at::Tensor&& out, at::Tensor** result) { *result = new at::Tensor(std::move(out)); }

}  // namespace
}  // namespace tch_extension::gemm

using namespace tch_extension;
using namespace tch_extension::gemm;

TCH_EXTENSION_API Message tch_extension_gemm_describe(const at::Tensor* lhs, const at::Tensor* rhs,
                                                      const at::Tensor* bias, bool is_linear,
                                                      bool relu, bool* is_supported,
                                                      GemmDescription* result) {
  return guard([&] {
    *is_supported = false;
    if (!takes_part(*lhs, *lhs) || !has_kernels(lhs->scalar_type()) || !takes_part(*rhs, *lhs) ||
        (bias != nullptr && !takes_part(*bias, *lhs)) || is_restricted()) {
      return;
    }
    *result = GemmDescription{};
    *is_supported = is_linear ? describe_linear(*lhs, *rhs, bias, relu, *result)
                              : describe_matmul(*lhs, *rhs, bias, relu, *result);
  });
}

TCH_EXTENSION_API Message tch_extension_gemm_run(const GemmDescription* described, GemmWay way,
                                                 at::Tensor** result) {
  return guard([&] {
    *result = nullptr;
    const auto device = static_cast<c10::DeviceIndex>(described->device);
    const c10::cuda::CUDAGuard device_guard(device);
    at::Tensor out = empty_output(*described);
    Product product = described->product;
    product.out = out.mutable_data_ptr();
    if (run(product, way, c10::cuda::getCurrentCUDAStream(device)))
      hand_over(std::move(out), result);
  });
}

TCH_EXTENSION_API Message tch_extension_gemm_run_together(const GemmDescription* described,
                                                          int32_t count, const void* norm_weight,
                                                          float norm_eps, bool is_gated,
                                                          at::Tensor** results) {
  return guard([&] {
    std::fill_n(results, count, nullptr);
    const auto device = static_cast<c10::DeviceIndex>(described->device);
    const c10::cuda::CUDAGuard device_guard(device);
    std::vector<Product> products;
    std::vector<at::Tensor> outputs;
    for (int32_t which = 0; which < count; ++which) {
      products.push_back(described[which].product);
      if (which > 0 && is_gated) continue;
      outputs.push_back(empty_output(described[which]));
      products.back().out = outputs.back().mutable_data_ptr();
    }
    if (!started(tch_extension_gemm_skinny_together_cuda(
            products.data(), count, norm_weight, norm_eps, is_gated,
            c10::cuda::getCurrentCUDAStream(device).stream())))
      return;
    for (at::Tensor& output : outputs) hand_over(std::move(output), results++);
  });
}

TCH_EXTENSION_API Message tch_extension_gemm_run_gelu(const GemmDescription* described,
                                                      bool wants_z, at::Tensor** result,
                                                      at::Tensor** z) {
  return guard([&] {
    *result = *z = nullptr;
    const auto device = static_cast<c10::DeviceIndex>(described->device);
    const c10::cuda::CUDAGuard device_guard(device);
    at::Tensor out = empty_output(*described);
    at::Tensor before = wants_z ? empty_output(*described) : at::Tensor();
    Product product = described->product;
    product.out = out.mutable_data_ptr();
    const Epilogue epilogue{true, wants_z ? before.mutable_data_ptr() : nullptr};
    if (!run_plan(product, device, c10::cuda::getCurrentCUDAStream(device).stream(), epilogue))
      return;
    hand_over(std::move(out), result);
    if (wants_z) hand_over(std::move(before), z);
  });
}

// For tests and benchmarks: the counters of this thread's cache of plans.
TCH_EXTENSION_API void tch_extension_gemm_counters(GemmCounters* result) { *result = counters(); }

#endif  // TCH_EXTENSION_CUDA
