// A sequence of steps in one kernel, whose blocks keep the recurrent weights on the chip.
// step/params.h has the formulas.
//
// A cluster of blocks computes kRows rows of the batch for all T steps and depends on no other
// cluster: clusters run at the same time or one after another, as they fit, scheduled by the
// hardware alone. A block owns adjacent columns of h and c, with all their gates. In each step of
// the forward pass it stores its columns of h into the shared memory of the other blocks. In the
// backward pass it has the gradients for its own gates, and so a partial sum of every column of dh:
// it sends to each block the partial sums of that block's columns. Sizes are padded with zeros to
// whole tiles.
#pragma once

#include "../scale_rows.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::cluster {

struct ForwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;  // from a row of W to the next, in elements
  int64_t c_stride;       // from a step's c to the next: B·H, or 0 if only the last one is needed
  int32_t kind;           // of the state
  int32_t product_kind;
  int32_t cluster;  // blocks that share rows
  int32_t reserved;
  const void* weight;       // W_h, [3H, H], of the product's kind
  const void* input_gates;  // [T, B, 3H], of the gates' kind
  const void* bias;         // [3H], of the gates' kind, null for zeros
  const void* h0;           // [B, H], of the product's kind
  const void* c0;           // [B, H], of the state's kind
  void* output;             // [T, B, H], of the state's kind
  void* c;                  // [T, B, H], or [B, H] with c_stride 0
  // [T, B, 3H], of the state's kind; null if nobody needs them; may be input_gates
  void* activations;
  // Both come from scale_rows.h where a state of float is multiplied as fp16 values instead of
  // tf32; otherwise they are null. With them h is sent as h · kMessageScale.
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
  int32_t cluster;
  int32_t needs_grad_h0;
  const void* weight;       // W_h, [3H, H], of the product's kind
  const void* grad_output;  // [T, B, H], of the state's kind, null for zeros
  const void* activations;  // [T, B, 3H], of the state's kind
  const void* c;            // [T, B, H], of the state's kind
  // [B, H], of the gates' kind: on entry the gradient for h[T-1], which is added to the output's;
  // on return the one for h0
  void* grad_h;
  // [B, H], of the gates' kind: on entry the gradient for c[T-1], on return the one for c0
  void* grad_c;
  void* grad_gates;     // [T, B, 3H], of the product's kind; of the state's, where there are scales
  const float* scales;  // [3H], of W_h's rows, as in the forward pass
};

}  // namespace tch_extension::recurrent::cluster
