#ifdef TCH_EXTENSION_CUDA

#include "padded_product.h"

#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>

#include "plan.h"
#include "tch_extension/kind.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::gemm {
namespace {

constexpr int64_t kBytes = 16;

int64_t element_size(const Product& product) {
  return static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(product.kind)));
}

// An operand as contiguous lines: its rows or, if `by_columns`, its columns.
struct Factor {
  Matrices matrices;
  bool by_columns;
  int64_t line;
  int64_t lines;
  int64_t length;
  int64_t padded_lines;
  int64_t padded_length;
};

std::optional<Factor> factor_of(const Matrices& matrices, int64_t rows, int64_t columns,
                                int64_t padded_rows, int64_t padded_columns) {
  if (columns == 1 || matrices.column == 1) {
    return Factor{matrices, false, matrices.row, rows, columns, padded_rows, padded_columns};
  }
  if (rows == 1 || matrices.row == 1) {
    return Factor{matrices, true, matrices.column, columns, rows, padded_columns, padded_rows};
  }
  return std::nullopt;
}

// The padded sizes of a product. A size is padded to a multiple of 16 bytes if its dimension is
// contiguous in a matrix: M in lhs, K in lhs or rhs, and always N, which is contiguous in the
// output.
struct Sizes {
  int64_t m;
  int64_t n;
  int64_t k;
};

Sizes padded_sizes(const Product& product) {
  const int64_t lanes = kBytes / element_size(product);
  const auto padded = [&](int64_t size) { return round_up(size, lanes); };
  const bool lhs_by_columns = product.k > 1 && product.lhs.column != 1;
  const bool rhs_by_columns = product.n > 1 && product.rhs.column != 1;
  const bool is_k_outer = lhs_by_columns && !rhs_by_columns;
  return {lhs_by_columns ? padded(product.m) : product.m, padded(product.n),
          is_k_outer ? product.k : padded(product.k)};
}

// Whether cuBLASLt can read the factor without a padded copy.
bool is_even(const Factor& factor, int64_t size) {
  return reinterpret_cast<uintptr_t>(factor.matrices.data) % kBytes == 0 &&
         factor.padded_lines == factor.lines && factor.padded_length == factor.length &&
         (factor.lines == 1 || factor.line * size % kBytes == 0) &&
         factor.matrices.batch * size % kBytes == 0;
}

// The padded sizes and factors of a product, and which of its matrices have to be copied.
struct Padded {
  Sizes sizes;
  Factor lhs;
  Factor rhs;
  std::optional<Factor> bias;  // empty if it needs no copy
  bool copies_lhs;
  bool copies_rhs;
  bool copies_out;

  int64_t launches() const { return (copies_lhs || copies_rhs || bias) + copies_out; }
};

int64_t matrices_of(const Factor& factor, const Product& product) {
  return factor.matrices.batch == 0 ? 1 : product.batch;
}

std::optional<Padded> padded_of(const Product& product) {
  const int64_t size = element_size(product);
  const Sizes sizes = padded_sizes(product);
  const auto lhs = factor_of(product.lhs, product.m, product.k, sizes.m, sizes.k);
  const auto rhs = factor_of(product.rhs, product.k, product.n, sizes.k, sizes.n);
  if (!lhs || !rhs) return std::nullopt;
  Padded padded{sizes, *lhs, *rhs, std::nullopt, !is_even(*lhs, size), !is_even(*rhs, size), false};
  padded.copies_out = sizes.m != product.m || sizes.n != product.n ||
                      reinterpret_cast<uintptr_t>(product.out) % kBytes != 0;
  if (product.bias.data == nullptr) return padded;
  const bool is_row = product.m == 1 || product.bias.row == 0;
  if (product.n > 1 && product.bias.column != 1) return std::nullopt;
  const Factor bias{
      product.bias,         false,  product.bias.row, is_row ? 1 : product.m, product.n,
      is_row ? 1 : sizes.m, sizes.n};
  if (!is_even(bias, size)) padded.bias = bias;
  return padded;
}

int64_t elements_of(const Factor& factor, const Product& product) {
  return matrices_of(factor, product) * factor.padded_lines * factor.padded_length;
}

// One allocation that is divided into pieces. Each begins at a multiple of the largest alignment
// that cuBLASLt asks for.
class Scratch {
 public:
  int64_t add(int64_t bytes) {
    constexpr int64_t kAlignment = 256;
    const int64_t at = bytes_;
    bytes_ += round_up(bytes, kAlignment);
    return at;
  }
  void allocate() {
    memory_ = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(bytes_));
  }
  void* at(int64_t offset) const { return static_cast<char*>(memory_.get()) + offset; }

 private:
  int64_t bytes_ = 0;
  at::DataPtr memory_;
};

GemmLines lines_of(const Factor& factor, const Product& product, void* to) {
  return {factor.matrices.data,         to,           factor.line,   factor.matrices.batch,
          matrices_of(factor, product), factor.lines, factor.length, factor.padded_lines,
          factor.padded_length};
}

// The padded copy of a factor, as an operand.
Matrices copied(const Factor& factor, const void* data) {
  const int64_t batch = factor.matrices.batch == 0 ? 0 : factor.padded_lines * factor.padded_length;
  if (factor.by_columns) return {data, 1, factor.padded_length, batch};
  return {data, factor.padded_lines == 1 ? 0 : factor.padded_length, 1, batch};
}

}  // namespace

std::optional<GemmPadding> padding_facts(const Product& product) {
  constexpr int64_t kMostBlocks = 65535;  // the limit of a grid's second dimension
  constexpr int64_t kMost = INT32_MAX - 16;
  if (product.batch > kMostBlocks || std::max({product.m, product.n, product.k}) > kMost)
    return std::nullopt;
  const auto padded = padded_of(product);
  if (!padded || padded->launches() == 0) return std::nullopt;
  // In floating point, because a broadcast operand may have more elements than memory holds.
  const auto elements = [&](const Factor& factor) {
    return static_cast<double>(matrices_of(factor, product)) *
           static_cast<double>(factor.padded_lines) * static_cast<double>(factor.padded_length);
  };
  GemmPadding facts{};
  facts.lhs = elements(padded->lhs);
  facts.rhs = elements(padded->rhs);
  facts.out = static_cast<double>(product.batch) * static_cast<double>(padded->sizes.m) *
              static_cast<double>(padded->sizes.n);
  facts.copied = (padded->copies_lhs ? facts.lhs : 0) + (padded->copies_rhs ? facts.rhs : 0) +
                 (padded->bias ? elements(*padded->bias) : 0) +
                 (padded->copies_out ? facts.out : 0);
  facts.launches = padded->launches();
  return facts;
}

bool padded_product(const Product& product, int32_t device, cudaStream_t stream) {
  const auto padded = padded_of(product);
  if (!padded) return false;
  const auto& [sizes, lhs, rhs, bias, copies_lhs, copies_rhs, copies_out] = *padded;
  const int64_t size = element_size(product);
  Scratch scratch;
  const int64_t lhs_at = scratch.add(copies_lhs ? elements_of(lhs, product) * size : 0);
  const int64_t rhs_at = scratch.add(copies_rhs ? elements_of(rhs, product) * size : 0);
  const int64_t bias_at = scratch.add(bias ? elements_of(*bias, product) * size : 0);
  const int64_t out_at = scratch.add(copies_out ? product.batch * sizes.m * sizes.n * size : 0);
  scratch.allocate();
  Product inner = product;
  inner.m = sizes.m;
  inner.n = sizes.n;
  inner.k = sizes.k;
  GemmPadFactors padding{};
  padding.kind = product.kind;
  const auto copy = [&](int place, const Factor& factor, int64_t at) {
    padding.factor[place] = lines_of(factor, product, scratch.at(at));
    return copied(factor, scratch.at(at));
  };
  if (copies_lhs) inner.lhs = copy(0, lhs, lhs_at);
  if (copies_rhs) inner.rhs = copy(1, rhs, rhs_at);
  if (bias) inner.bias = copy(2, *bias, bias_at);
  if (copies_lhs || copies_rhs || bias)
    started(tch_extension_gemm_pad_factors_cuda(&padding, stream));
  if (copies_out) {
    // The kernel that removes the padding applies the ReLU at no extra cost.
    inner.out = scratch.at(out_at);
    inner.relu = 0;
  }
  if (!run_plan(inner, device, stream)) return false;
  if (!copies_out) return true;
  const GemmFinishProduct finish{inner.out, product.out, product.batch, product.m,   product.n,
                                 sizes.m,   sizes.n,     product.kind,  product.relu};
  started(tch_extension_gemm_finish_product_cuda(&finish, stream));
  return true;
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
