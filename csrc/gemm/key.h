// The key of a plan in the cache of plans.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "product.h"

namespace tch_extension::gemm {

enum class Bias : int32_t { kNone, kRow, kFull };

struct Operand {
  // Elements from one row to the next, or from one column to the next if transposed.
  int64_t leading;
  // Elements from one matrix to the next; 0 if the whole batch shares one.
  int64_t batch_stride;
  // Whether the columns are contiguous, instead of the rows.
  int32_t transposed;
  // The alignment of the address in bytes, a power of two.
  int32_t alignment;
};

// Everything that a plan depends on. It is compared and hashed as bytes.
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
  int32_t compute;     // cublasComputeType_t that libtorch's switches ask for
  int32_t reductions;  // cublasLtReductionScheme_t values that the switches allow
  int32_t gelu;        // whether the epilogue has a GELU
  int32_t keeps_z;     // whether it writes what the GELU is computed of
};
static_assert(std::has_unique_object_representations_v<Key>,
              "no padding, whose bytes could be anything");

// The key of a product on this device, with libtorch's switches as they are now. Empty if cuBLASLt
// cannot read an operand or the bias in its own layout, or has no such epilogue for them.
std::optional<Key> key_of(const Product& product, const Epilogue& epilogue, int32_t device);

}  // namespace tch_extension::gemm
