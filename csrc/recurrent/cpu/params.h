// The parameters of all steps on the CPU. step/params.h has the formulas and what the sizes mean.
#pragma once

#include "tch_extension/kind.h"

namespace tch_extension::recurrent::cpu {

// How the CPU's threads share a sequence: each has a place, a group of rows and a group of columns.
// Those of the same rows wait for one another after each step.
struct Team {
  int64_t row_groups;
  int64_t column_groups;
  int64_t* counters;  // [1 + row_groups + places, 8] zeros: of team.h; a cache line each
};

// All steps on the CPU, for double and float.
struct ForwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;  // from a row of W to the next, in elements
  int64_t c_stride;       // from a step's c to the next: B·H, or 0 if only the last one is needed
  int32_t kind;
  int32_t reserved;
  Team team;
  const void* weight;       // W_h, [3H, H]
  const void* input_gates;  // [T, B, 3H], with the bias
  const void* h0;           // [B, H]
  const void* c0;           // [B, H]
  void* output;             // [T, B, H]
  void* c;                  // [T, B, H], or [B, H] with c_stride 0
  void* activations;        // [T, B, 3H], null if nobody needs them; may be input_gates
  void* packed;             // scratch of 3H · H' values, H' = H rounded up to a multiple of 32
};

struct BackwardParams {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;
  int32_t kind;
  int32_t needs_grad_h0;
  Team team;
  const void* weight;       // W_h, [3H, H]
  const void* grad_output;  // [T, B, H], null for zeros
  const void* activations;  // [T, B, 3H]
  const void* c;            // [T, B, H]
  void* grad_h;             // [B, H]: for h[T-1], added to the output's, and then for h0
  void* grad_c;             // [B, H]: for c[T-1], and then for c0
  void* grad_gates;         // [T, B, 3H]
  void* packed;             // scratch as in the forward
};

}  // namespace tch_extension::recurrent::cpu
