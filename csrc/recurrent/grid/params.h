// A sequence of steps in one kernel whose blocks fill the GPU: for weights that no cluster can
// hold. step/params.h has the formulas.
//
// A group of blocks, one on each multiprocessor, holds W_h once: each block has adjacent columns of
// h with all their gates. The group works through its part of the batch, kRows rows (a sub-batch)
// at a time. Blocks send one another h through the L2 cache, and the result itself is the message:
// before the kernel all bits of `exchange` are set, which is a NaN that no block ever sends (it
// sends another NaN in its place), and a reader repeats its load until it finds something else.
// Nothing is written twice, and each word (of double, and in the wide grid, each 8 bytes) is data
// and flag at once. Therefore there are no flags, no barriers between blocks and no fences, and
// relaxed loads and stores are enough. In the scaled backward pass (scaled.h) exponents are single
// bytes, four of which a reader loads at once: PTX's memory model does not cover that, but it works
// on Hopper. All blocks have to run at the same time, which a cooperative launch ensures.
//
// With many rows, half kinds and scaled fp16 values are computed in tiles of 64 rows
// (../wide_grid): that many fill the products of warpgroups, and W_h is in shared memory. Float and
// double that must not be rounded are multiplied as double (plain.h).
#pragma once

#include "../params.h"
#include "../scale_rows.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::grid {

// The sizes for which the backward pass's scaled messages have room, in grid and in wide_grid: B'
// rows and H' columns, which are B and H rounded up to these multiples; and a float for each row
// and each kColumnsOfScale of H'' columns, where H'' is H rounded up to a multiple of
// kScaledColumns.
constexpr int64_t kExchangeRows = 8;
constexpr int64_t kExchangeColumns = 32;
constexpr int64_t kColumnsOfScale = 16;
constexpr int64_t kScaledColumns = 128;

using ForwardParams = ::RecurrentGridForward;
using BackwardParams = ::RecurrentGridBackward;

}  // namespace tch_extension::recurrent::grid
