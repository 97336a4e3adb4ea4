// What surrounds a product whose rows do not begin at multiples of 16 bytes: what it reads is
// copied to rows that do, and what comes out is brought together again.
#pragma once

#include "product.h"
#include "tch_extension/launch.h"

namespace tch_extension::gemm {

// Lines of neighbours, in a batch of matrices, and where they go: behind one another, longer and
// more of them, with zeros where there was nothing.
struct Lines {
  const void* from;
  void* to;
  int64_t line;   // elements from one to the next, in `from`
  int64_t batch;  // from one matrix to the next, in `from`
  int64_t matrices;
  int64_t lines;  // of a matrix
  int64_t length;
  int64_t padded_lines;
  int64_t padded_length;  // a multiple of 16 bytes
};

// Of lhs, rhs and bias, in one launch; one without matrices is left out.
struct Padding {
  static constexpr int kFactors = 3;
  Lines factor[kFactors];
  int32_t kind;
};

LaunchStatus pad_factors(const Padding& padding, cudaStream_t stream);

// From matrices of padded rows to `out`, which is contiguous, and may be where they are if nothing
// is padded. NaN stays.
struct Finish {
  const void* from;
  void* out;
  int64_t batch;
  int64_t rows;
  int64_t columns;
  int64_t padded_rows;
  int64_t padded_columns;  // a multiple of 16 bytes, if not `columns`
  int32_t kind;
  int32_t relu;
};

LaunchStatus finish_product(const Finish& finish, cudaStream_t stream);

}  // namespace tch_extension::gemm
