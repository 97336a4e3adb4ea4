// A sequence of LLTM steps in one kernel whose blocks fill the GPU: for weights that no cluster can
// hold. lltm.h has the formulas.
//
// A group of blocks, one on a multiprocessor, holds W_h once: each block has neighbouring columns
// of h in all three gates. It works through its part of the batch, kRows rows at a time. Blocks
// send one another h through the L2 cache, and the result is the message: before the kernel all
// bits of `exchange` are set, a not-a-number that no sender sends (it sends another one in its
// place), and whoever reads tries again until there is something else. Nothing is written twice,
// and each word (of double, and in the wide grid, each 8 bytes) is data and flag at once: so there
// are no flags, no barriers between blocks and no fences, and relaxed loads and stores are enough.
// The exponents of grid_scaled.h's backward are bytes of which a reader takes four, which PTX's
// memory model does not speak of; it holds on Hopper. All blocks have to run at the same time,
// which a cooperative launch makes sure of.
//
// With many rows, half kinds and scaled halves go through them 64 at a time (grid_wide.h): that
// many fill products of warpgroups, and W_h lies in shared memory. What may not be rounded, float
// and double, is multiplied as double (grid_plain.h).
#pragma once

#include "../scale_rows.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::grid {

// What the backward's messages with scales have room for, whichever grid sends them: B' rows and H'
// columns, B and H rounded up to these, and a float for each row and kColumnsOfScale of H''
// columns, H rounded up to kScaledColumns.
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
  int32_t columns;          // of h, for each block: 16 or 32; of float and double 4, 6 or 16
  int32_t row_groups;       // groups of blocks, which share the batch
  const void* weight;       // W_h, [3H, H], of the product's kind
  const void* input_gates;  // [T, B, 3H], of the gates' kind
  const void* bias;         // [3H], of the gates' kind, null for zeros
  const void* h0;           // [B, H], of the product's kind, at a multiple of 16 bytes
  const void* c0;           // [B, H], of the state's kind
  void* output;             // [T, B, H], of the state's kind
  void* exchange;           // [T, B, H], of the product's kind: the output, if the kinds are one
  void* c;                  // [T, B, H], or [B, H] with c_stride 0
  void* activations;        // [T, B, 3H], of the state's kind; null if nobody needs them; may be
                            // input_gates
  // Of scale_rows.h, where a state of float is multiplied in halves instead of tf32; null
  // otherwise. Messages are h · kMessageScale then.
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
  const void* c;  // [T, B, H], of the state's kind; these three at multiples of two of its values
  void* grad_h;   // [B, H], of the gates' kind: for h[T-1] beside the output's, and then for h0
  void* grad_c;   // [B, H], of the gates' kind: for c[T-1], and then for c0
  void* grad_gates;  // [T, B, 3H], of the product's kind; of the state's, where there are scales
  // As in the forward. The messages are in memory of their own then, with a scale for each row and
  // sender.
  const float* scales;  // [3H], of W_h's rows
  void* exchange;  // halves, [T, B', 3H'], in the order of grid_scaled.h or of grid_wide_scaled.h
  // Right behind, [T, B', H'' / kColumnsOfScale]: the wide grid's scales; the grid's are exponents,
  // in bytes.
  float* exchange_scales;
};

}  // namespace tch_extension::recurrent::grid
