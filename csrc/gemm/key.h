// What a plan depends on.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "product.h"

namespace tch_extension::gemm {

enum class Bias : int32_t { kNone, kRow, kFull };

struct Operand {
  int64_t leading;       // elements from one row to the next; from one column, if transposed
  int64_t batch_stride;  // from one matrix to the next; 0 where all share it
  int32_t transposed;  // whether the elements of a column are neighbours instead of those of a row
  int32_t alignment;   // of the address, in bytes, a power of two
};

// All that a plan depends on. Compared and hashed as bytes.
struct Key {
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t batch;
  Operand lhs;
  Operand rhs;
  Operand bias;
  Bias bias_as;
  int32_t relu;
  int32_t device;
  int32_t kind;        // TchExtensionKind of every matrix
  int32_t compute;     // cublasComputeType_t, as libtorch's switches have it
  int32_t reductions;  // cublasLtReductionScheme_t that they allow
};
static_assert(std::has_unique_object_representations_v<Key>,
              "no padding, whose bytes could be anything");

// Of a product on this device, as libtorch's switches are now. None, if cuBLASLt does not know how
// its operands lie.
std::optional<Key> key_of(const Product& product, int32_t device);

}  // namespace tch_extension::gemm
