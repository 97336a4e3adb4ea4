// The parameters of all steps of a cell on the CPU, for double and float. cells/cell.h says what a
// cell is: it has G gates (kGates) and saves V values of a column (kSaved); both are 3 for LLTM.
// There are T steps, the batch size is B and the hidden size is H. All arrays are row-major,
// contiguous and of one kind unless stated otherwise.
#pragma once

#include "tch_extension/kind.h"

namespace tch_extension::recurrent::cpu {

// How the threads share a sequence. There are row_groups · column_groups places, each with a group
// of rows of the batch and a group of columns of h. The places with the same rows wait for one
// another after each step.
struct Team {
  int64_t row_groups;
  int64_t column_groups;
  int64_t* counters;  // zeros, [1 + row_groups + places, 8]: team.h's, a cache line each
};

struct ForwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  // The distance from a row of W_h to the next, in elements.
  int64_t weight_stride;
  // The distance from a step's state to the next one's: B·H, or 0 if only the last one is needed.
  // It is B·H where the state is h.
  int64_t c_stride;
  int32_t kind;
  int32_t reserved;
  Team team;
  const void* weight;  // W_h, [G·H, H]
  // [T, B, G·H]: the product with the input, plus the bias. For gates that are separate (the
  // candidate of a GRU) this excludes the bias of the product with h.
  const void* input_gates;
  const void* h0;  // [B, H]
  const void* c0;  // [B, H], the state; h0 where the state is h
  void* output;    // [T, B, H]
  void* c;         // [T, B, H], or [B, H] with c_stride 0; `output` where the state is h
  // [T, B, V·H]: the saved values, null if nobody needs them. May be input_gates where V = G.
  void* activations;
  void* packed;  // scratch of G·H · H' values, H' = H rounded up to a multiple of 32
  // [S·H]: the bias of the product with h of the S separate gates (kSeparate), null for zeros.
  const void* separate_bias;
};

struct BackwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;
  int32_t kind;
  int32_t needs_grad_h0;
  Team team;
  const void* weight;       // W_h, [G·H, H]
  const void* grad_output;  // [T, B, H], null for zeros
  const void* activations;  // [T, B, V·H]
  const void* c;            // [T, B, H], the states; the output where the state is h
  // [B, H]: on entry the gradient for h[T-1], which is added to the last step's of the output; on
  // return, if needs_grad_h0, the one for h0.
  void* grad_h;
  // [B, H]: on entry the gradient for the last state; on return the one for the first. Where the
  // state is h: zeros on entry, and of no use on return.
  void* grad_c;
  // [T, B, G·H]: the gradients for what the product with W_h is added to. The gradients of W_h and
  // of its bias follow from them, and those of the input, except for gates that are separate.
  void* grad_gates;
  void* packed;         // scratch as in the forward pass
  const void* c0;       // [B, H], the first state; null unless the cell needs the state before
  void* grad_separate;  // [T, B, S·H]: for the input's part of the separate gates; null without any
};

}  // namespace tch_extension::recurrent::cpu
