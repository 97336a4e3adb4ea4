// The bias' gradient of a linear layer; its products are libtorch's. src/ops/linear/kernels.rs
// mirrors this struct, and a test compares sizes and offsets.
//
//   db = Σ dY over the rows
//
// Sums of the half kinds are made in float and rounded once.
#pragma once

#include "tch_extension/column_sums.h"

struct LinearBiasGrad {
  TchExtensionColumnSums sums;  // M rows, N = out columns; sums.sums is db, [N]
  int64_t row_stride;           // from a row of dY to the next, in elements
  int32_t kind;                 // TchExtensionKind of dY and db
  int32_t reserved;
  const void* grad;  // dY, [M, N], the N of a row contiguous
};
