#ifdef TCH_EXTENSION_CUDA

#include "descriptors.h"

#include <c10/util/Exception.h>

#include <utility>

#include "tch_extension/kind.h"

namespace tch_extension::gemm {
namespace {

cudaDataType_t data_type(int32_t kind) {
  switch (kind) {
    case kTchExtensionHalf:
      return CUDA_R_16F;
    case kTchExtensionBFloat16:
      return CUDA_R_16BF;
    case kTchExtensionDouble:
      return CUDA_R_64F;
    default:
      return CUDA_R_32F;
  }
}

// The type of cuBLASLt's scaling factors alpha and beta, which are 0 or 1.
cudaDataType_t scale_type(const Key& key) {
  switch (key.compute) {
    case CUBLAS_COMPUTE_64F:
      return CUDA_R_64F;
    case CUBLAS_COMPUTE_16F:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

cublasLtEpilogue_t gelu_epilogue(bool has_bias, bool keeps_z) {
  if (keeps_z) return has_bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  return has_bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
}

cublasLtEpilogue_t epilogue(const Key& key) {
  if (key.gelu) return gelu_epilogue(key.bias_as == Bias::kRow, key.keeps_z != 0);
  if (key.bias_as == Bias::kRow)
    return key.relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
  return key.relu ? CUBLASLT_EPILOGUE_RELU : CUBLASLT_EPILOGUE_DEFAULT;
}

template <typename T>
void set(cublasLtMatmulDescOpaque_t& product, cublasLtMatmulDescAttributes_t attribute,
         const T& value) {
  check(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value));
}

// The layout of a matrix of `rows` × `columns`. cuBLASLt's matrices are column-major, so it sees a
// row-major operand as its transpose, and a transposed operand as the matrix itself.
cublasLtMatrixLayoutOpaque_t layout(const Key& key, int64_t rows, int64_t columns,
                                    const Operand& operand) {
  if (operand.transposed) std::swap(rows, columns);
  cublasLtMatrixLayoutOpaque_t layout;
  check(cublasLtMatrixLayoutInit(&layout, data_type(key.kind), columns, rows, operand.leading));
  if (key.batch > 1) {
    const auto batch = static_cast<int32_t>(key.batch);
    const int64_t stride = operand.batch_stride;
    check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch,
                                           sizeof batch));
    check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                           &stride, sizeof stride));
  }
  return layout;
}

}  // namespace

void check(cublasStatus_t status) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", cublasLtGetStatusString(status));
}

void describe(const Key& key, const Pointers& pointers, Descriptors& descriptors) {
  check(cublasLtMatmulDescInit(&descriptors.product, static_cast<cublasComputeType_t>(key.compute),
                               scale_type(key)));
  const auto operation = [](const Operand& operand) {
    return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  set(descriptors.product, CUBLASLT_MATMUL_DESC_TRANSA, operation(key.rhs));
  set(descriptors.product, CUBLASLT_MATMUL_DESC_TRANSB, operation(key.lhs));
  set(descriptors.product, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(key));
  set_pointers(key, pointers, descriptors);
  if (key.bias_as == Bias::kRow && key.batch > 1)
    set(descriptors.product, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, key.bias.batch_stride);
  if (key.keeps_z) set(descriptors.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
  const Operand out{key.n, key.m * key.n, 0, 0};
  descriptors.lhs = layout(key, key.m, key.k, key.lhs);
  descriptors.rhs = layout(key, key.k, key.n, key.rhs);
  descriptors.bias = layout(key, key.m, key.n, key.bias_as == Bias::kFull ? key.bias : out);
  descriptors.out = layout(key, key.m, key.n, out);
}

void set_pointers(const Key& key, const Pointers& pointers, Descriptors& descriptors) {
  if (key.bias_as == Bias::kRow)
    set(descriptors.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias);
  if (key.keeps_z) set(descriptors.product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, pointers.z);
}

const void* factor(const Key& key, bool one) {
  static constexpr double kDouble[] = {0, 1};
  static constexpr float kFloat[] = {0, 1};
  static constexpr uint16_t kHalf[] = {0, 0x3C00};
  switch (scale_type(key)) {
    case CUDA_R_64F:
      return &kDouble[one];
    case CUDA_R_16F:
      return &kHalf[one];
    default:
      return &kFloat[one];
  }
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
