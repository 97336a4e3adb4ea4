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
// With many rows, half kinds and scaled fp16 values are computed 64 rows at a time (../wide_grid):
// that many fill the products of warpgroups, and W_h is in shared memory. Float and double that
// must not be rounded are multiplied as double (plain.h).
#pragma once

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

struct ForwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;         // a multiple of 8
  int64_t weight_stride;  // from a row of W to the next, in elements
  int64_t c_stride;       // from a step's c to the next: B·H, or 0 if only the last one is needed
  int32_t kind;           // of the state
  int32_t product_kind;
  int32_t columns;          // columns of h per block: 16 or 32; for float and double 4, 6 or 16
  int32_t row_groups;       // groups of blocks, which share the batch
  const void* weight;       // W_h, [3H, H], of the product's kind
  const void* input_gates;  // [T, B, 3H], of the gates' kind
  const void* bias;         // [3H], of the gates' kind, null for zeros
  const void* h0;           // [B, H], of the product's kind, at a multiple of 16 bytes
  const void* c0;           // [B, H], of the state's kind
  void* output;             // [T, B, H], of the state's kind
  void* exchange;  // [T, B, H], of the product's kind: the output, if both kinds are the same
  void* c;         // [T, B, H], or [B, H] with c_stride 0
  // [T, B, 3H], of the state's kind; null if nobody needs them; may be input_gates
  void* activations;
  // Both come from scale_rows.h where a state of float is multiplied as fp16 values instead of
  // tf32; otherwise they are null. With them messages are h · kMessageScale.
  const float* scales;     // [3H], of W_h's rows
  const float* h0_scales;  // [B], of h0's
};

struct BackwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;
  int32_t kind;
  int32_t product_kind;
  int32_t columns;
  int32_t row_groups;
  int32_t needs_grad_h0;
  int32_t reserved;
  const void* weight;       // W_h, [3H, H], of the product's kind
  const void* grad_output;  // [T, B, H], of the state's kind, null for zeros
  const void* activations;  // [T, B, 3H], of the state's kind
  const void* c;  // [T, B, H], of the state's kind; these three are aligned to two of its values
  // [B, H], of the gates' kind: on entry the gradient for h[T-1], which is added to the output's;
  // on return the one for h0
  void* grad_h;
  // [B, H], of the gates' kind: on entry the gradient for c[T-1], on return the one for c0
  void* grad_c;
  void* grad_gates;  // [T, B, 3H], of the product's kind; of the state's, where there are scales
  // As in the forward pass. With scales, the messages are in memory of their own, with a scale for
  // each row and sender.
  const float* scales;  // [3H], of W_h's rows
  // fp16 values, [T, B', 3H'], in the order of scaled.h or of ../wide_grid/scaled.h
  void* exchange;
  // [T, B', H'' / kColumnsOfScale], directly after `exchange`: the scales of the wide grid. Those
  // of the grid are exponents, one byte each.
  float* exchange_scales;
};

}  // namespace tch_extension::recurrent::grid
