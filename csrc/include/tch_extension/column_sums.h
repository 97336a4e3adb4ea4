// Sums of the columns of a matrix, such as a bias' gradient: what kernels for the CPU
// (cpu_column_sums.h) and for CUDA (cuda_column_sums.h) share. src/ops/column_sums.rs mirrors the
// struct.
//
// The rows are cut into slabs, whose sums go to `partial` and are summed by a second kernel; a
// single slab's are the result. Sizes alone decide where the cuts are, so that the same inputs give
// the same bits.
//
// Needs: nothing.
#pragma once

#include "tch_extension/kind.h"

struct TchExtensionColumnSums {
  int64_t rows;     // M
  int64_t columns;  // N
  int64_t slabs;    // S, at least 1 and at most 65535 on CUDA
  void* partial;    // [S, N] of the compute kind (float for the half kinds); null when S is 1
  void* sums;       // [N]
};
