#ifdef TCH_EXTENSION_CUDA

#include "key.h"

#include <ATen/Context.h>
#include <c10/core/ScalarType.h>
#include <cublasLt.h>

#include "tch_extension/kind.h"

namespace tch_extension::gemm {
namespace {

// cuBLASLt does not distinguish larger alignments.
constexpr int32_t kMostAlignment = 256;

int32_t alignment_of(const void* pointer) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) | kMostAlignment;
  return static_cast<int32_t>(address & ~(address - 1));
}

// The matrix as a row-major or transposed operand of cuBLASLt; empty if it is neither. The stride
// of a dimension of size 1 does not matter.
std::optional<Operand> as_operand(const Matrices& matrices, int64_t rows, int64_t columns) {
  Operand operand{0, matrices.batch, 0, alignment_of(matrices.data)};
  if ((columns == 1 || matrices.column == 1) && (rows == 1 || matrices.row >= columns)) {
    operand.leading = rows == 1 ? columns : matrices.row;
    return operand;
  }
  if ((rows == 1 || matrices.row == 1) && (columns == 1 || matrices.column >= rows)) {
    operand.leading = columns == 1 ? rows : matrices.column;
    operand.transposed = 1;
    return operand;
  }
  return std::nullopt;
}

// Decides how the bias is passed to cuBLASLt; false if it cannot be. A bias with one value per
// column goes into the epilogue if its address and batch stride are multiples of 16 bytes (with
// others the epilogue was seen to fail). Otherwise it is passed as the matrix C with a leading
// dimension of 0, so that all rows have the same address. A bias of full shape is the matrix C,
// too. A bias with one value per row can be passed in neither way.
bool place_bias(const Product& product, Key& key) {
  const Matrices& bias = product.bias;
  if (bias.data == nullptr) return true;
  const bool is_row = product.m == 1 || bias.row == 0;
  if (product.n > 1 && bias.column != 1) return false;
  if (!is_row && bias.row < product.n) return false;
  const int64_t bytes =
      bias.batch *
      static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(product.kind)));
  key.bias_as =
      is_row && alignment_of(bias.data) >= 16 && bytes % 16 == 0 ? Bias::kRow : Bias::kFull;
  // If there is only one row, the leading dimension is the row's length; otherwise 0 makes all rows
  // the same.
  const int64_t one_place = product.m == 1 ? product.n : 0;
  key.bias = {is_row ? one_place : bias.row, bias.batch, 0, alignment_of(bias.data)};
  return true;
}

// Applies libtorch's precision switches for products of this kind.
void obey_switches(Key& key) {
  auto& context = at::globalContext();
  const auto reductions = [](at::CuBLASReductionOption option) -> int32_t {
    switch (option) {
      case at::CuBLASReductionOption::DisallowReducedPrecisionAllowSplitK:
        return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_NONE;
      case at::CuBLASReductionOption::DisallowReducedPrecisionDisallowSplitK:
        return CUBLASLT_REDUCTION_SCHEME_NONE;
      default:
        return CUBLASLT_REDUCTION_SCHEME_MASK;
    }
  };
  key.compute = CUBLAS_COMPUTE_32F;
  key.reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  switch (key.kind) {
    case kTchExtensionDouble:
      key.compute = CUBLAS_COMPUTE_64F;
      break;
    case kTchExtensionFloat:
      if (context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32) {
        key.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
      }
      break;
    case kTchExtensionHalf:
      if (context.allowFP16AccumulationCuBLAS()) key.compute = CUBLAS_COMPUTE_16F;
      key.reductions = reductions(context.allowFP16ReductionCuBLAS());
      break;
    case kTchExtensionBFloat16:
      key.reductions = reductions(context.allowBF16ReductionCuBLAS());
      break;
  }
}

bool is_half(const Product& product) {
  return product.kind == kTchExtensionHalf || product.kind == kTchExtensionBFloat16;
}

// Whether cuBLASLt has this epilogue for the product. Its documentation wants rows of z that are a
// multiple of 8 elements. Its heuristic depends on how z is aligned, so that a plan is for z as the
// allocator aligns it. A bias that is passed as the matrix C was not tried with it, and
// neither were batches and other kinds.
bool can_have(const Product& product, const Epilogue& epilogue, const Key& key) {
  if (!epilogue.gelu) return true;
  const bool fits_z =
      epilogue.z == nullptr || (product.n % 8 == 0 && alignment_of(epilogue.z) == kMostAlignment);
  return is_half(product) && product.batch == 1 && !product.relu && key.bias_as != Bias::kFull &&
         fits_z;
}

}  // namespace

std::optional<Key> key_of(const Product& product, const Epilogue& epilogue, int32_t device) {
  const auto lhs = as_operand(product.lhs, product.m, product.k);
  const auto rhs = as_operand(product.rhs, product.k, product.n);
  Key key{};
  if (!lhs || !rhs || !place_bias(product, key)) return std::nullopt;
  if (!can_have(product, epilogue, key)) return std::nullopt;
  key.gelu = epilogue.gelu;
  key.keeps_z = epilogue.z != nullptr;
  key.m = product.m;
  key.n = product.n;
  key.k = product.k;
  key.batch = product.batch;
  key.lhs = *lhs;
  key.rhs = *rhs;
  key.relu = product.relu;
  key.device = device;
  key.kind = product.kind;
  obey_switches(key);
  return key;
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
