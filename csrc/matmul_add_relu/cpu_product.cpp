#include "tch_extension/cpu_small_product.h"

#if defined(CPU_CAPABILITY_DEFAULT)
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "params.h"
#include "tch_extension/c_abi.h"
#endif

// The product of two matrices, out = lhs rhs. src/ops/matmul_add_relu/kernels.rs calls it where it
// is faster than libtorch's.
struct SmallProduct {
  int64_t rows;
  int64_t inner;
  int64_t columns;
  int32_t kind;  // Float or Double
  int64_t lhs_row, lhs_inner;
  int64_t rhs_inner;
  const void* lhs;  // [rows, inner], any strides
  const void* rhs;  // [inner, columns], contiguous rows
  void* out;        // [rows, columns], contiguous
};

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

// The size of a work item. Its columns are whole vectors, and few enough that the part of rhs that
// it reads stays in the L1 cache; its rows reuse that part often enough. The sizes are the same for
// every instruction set.
constexpr int64_t kRowsOfItem = 32;
constexpr int64_t kColumnsOfItem = 32;

int64_t pieces(int64_t size, int64_t piece) { return (size + piece - 1) / piece; }

int64_t items(const SmallProduct& product) {
  return pieces(product.rows, kRowsOfItem) * pieces(product.columns, kColumnsOfItem);
}

// Waking a thread costs as much as this many multiplications.
int64_t grain(const SmallProduct& product) {
  constexpr int64_t kMultiplications = 1 << 18;
  const int64_t of_item = kRowsOfItem * kColumnsOfItem * std::max<int64_t>(1, product.inner);
  return std::max<int64_t>(1, kMultiplications / of_item);
}

template <typename T>
void multiply(const SmallProduct& product, int64_t begin, int64_t end) {
  const int64_t row_pieces = pieces(product.rows, kRowsOfItem);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t row = item % row_pieces * kRowsOfItem,
                  column = item / row_pieces * kColumnsOfItem;
    small_product<T>({static_cast<const T*>(product.lhs) + row * product.lhs_row, product.lhs_row,
                      product.lhs_inner},
                     {static_cast<const T*>(product.rhs) + column, product.rhs_inner},
                     std::min(kRowsOfItem, product.rows - row), product.inner,
                     std::min(kColumnsOfItem, product.columns - column),
                     static_cast<T*>(product.out) + row * product.columns + column,
                     product.columns);
  }
}

}  // namespace

static void small_matrix_product(const SmallProduct& product, int64_t begin, int64_t end) {
  if (product.kind == kTchExtensionFloat) multiply<float>(product, begin, end);
  if (product.kind == kTchExtensionDouble) multiply<double>(product, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

extern "C" void tch_extension_small_matrix_product_cpu(const SmallProduct* params) noexcept;
TCH_EXTENSION_CPU_KERNEL(tch_extension_small_matrix_product, small_matrix_product, SmallProduct,
                         items, grain)

#if defined(CPU_CAPABILITY_DEFAULT)
namespace {

bool is_in_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         !tensor.is_nested() && !tensor.is_neg() && !tensor.is_conj() && !tensor._is_zerotensor() &&
         tensor.dim() == 2 && tensor.numel() > 0;
}

// Whether these are matrices that the kernel can read.
bool can_multiply(const at::Tensor& lhs, const at::Tensor& rhs) {
  if (!is_in_memory(lhs) || !is_in_memory(rhs) || lhs.scalar_type() != rhs.scalar_type())
    return false;
  if (lhs.scalar_type() != at::kFloat && lhs.scalar_type() != at::kDouble) return false;
  return rhs.size(0) == lhs.size(1) && rhs.stride(1) == 1;
}

}  // namespace

// libtorch's products are MKL's, whose fastest kernels are only for Intel's CPUs.
TCH_EXTENSION_API bool tch_extension_is_intel() { return __builtin_cpu_is("intel"); }

// The product of two matrices on the CPU, without autograd; null if the kernel cannot read them.
TCH_EXTENSION_API tch_extension::Message tch_extension_small_product(const at::Tensor* lhs,
                                                                     const at::Tensor* rhs,
                                                                     at::Tensor** result) {
  return tch_extension::guard([&] {
    *result = nullptr;
    if (!can_multiply(*lhs, *rhs)) return;
    at::Tensor out = at::empty({lhs->size(0), rhs->size(1)}, lhs->options());
    const SmallProduct product{lhs->size(0),          lhs->size(1),
                               rhs->size(1),          static_cast<int32_t>(lhs->scalar_type()),
                               lhs->stride(0),        lhs->stride(1),
                               rhs->stride(0),        lhs->const_data_ptr(),
                               rhs->const_data_ptr(), out.mutable_data_ptr()};
    tch_extension_small_matrix_product_cpu(&product);
    *result = new at::Tensor(std::move(out));
  });
}
#endif
