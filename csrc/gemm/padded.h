// The kernels before and after a product whose rows do not begin at multiples of 16 bytes.
// pad_factors copies its operands to padded rows, and finish_product copies the padded result to
// the output.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// The contiguous lines (rows or columns) of a batch of matrices, and their padded copy. The copy
// has the lines one after another, each padded with zeros to `padded_length`, and lines of zeros up
// to `padded_lines` per matrix.
struct Lines {
  const void* from;
  void* to;
  int64_t line;   // elements from one line to the next, in `from`
  int64_t batch;  // elements from one matrix to the next, in `from`
  int64_t matrices;
  int64_t lines;  // per matrix
  int64_t length;
  int64_t padded_lines;
  int64_t padded_length;  // a multiple of 16 bytes
};

// Pads lhs, rhs and bias in one launch. A factor with `matrices` = 0 is left out.
struct Padding {
  static constexpr int kFactors = 3;
  Lines factor[kFactors];
  int32_t kind;
};

LaunchStatus pad_factors(const Padding& padding, cudaStream_t stream);

// Copies matrices with padded rows to `out`, which is contiguous, and applies the ReLU if `relu` is
// set. If nothing is padded, `out` may be the same as `from`. NaN stays NaN.
struct Finish {
  const void* from;
  void* out;
  int64_t batch;
  int64_t rows;
  int64_t columns;
  int64_t padded_rows;
  int64_t padded_columns;  // `columns`, or a multiple of 16 bytes
  int32_t kind;
  int32_t relu;
};

LaunchStatus finish_product(const Finish& finish, cudaStream_t stream);

}  // namespace tch_extension::gemm
