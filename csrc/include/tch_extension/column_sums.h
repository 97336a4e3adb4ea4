// Sums of the columns of a matrix, for example the gradient of a bias. The kernels for the CPU
// (cpu_column_sums.h) and for CUDA (cuda_column_sums.h) share this struct. src/ops/column_sums.rs
// mirrors it.
//
// The rows are cut into slabs. The sums of each slab go to `partial`, and a second kernel adds them
// up. If there is a single slab, its sums are the result. The cuts depend only on the sizes, so
// that the same inputs give the same bits.
//
// Rows whose length is no multiple of 16 bytes cannot be read 16 bytes at a time, because most of
// them begin at another address. F of them can be read as one row that is F times as long, if the
// matrix is contiguous: all of those begin at multiples of 16 bytes. Each column then has F sums,
// which the second kernel adds up.
//
// Needs: nothing.
#pragma once

#include "tch_extension/kind.h"

struct TchExtensionColumnSums {
  int64_t rows;     // M
  int64_t columns;  // N
  int64_t slabs;    // S, at least 1 and at most 65535 on CUDA
  void* partial;    // [S·F, N] of the compute kind (float for the half kinds), null if S·F is 1
  void* sums;       // [N]
  int64_t fold;     // F: this many rows are read as one on CUDA; 0 and 1 switch folding off
};
