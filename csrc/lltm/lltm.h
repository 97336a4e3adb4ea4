// A sequence of LLTM steps; csrc/lltm_cell has the formula of one. The product with the input is
// made for all steps at once before; here is what each step waits for: the product with the step
// before's h, and the rest.
//
//   [i | o | g] = input_gates[t] + h[t-1] W_hᵀ + b        before their activations
//   c[t] = c[t-1] + elu(g) σ(i)        h[t] = tanh(c[t]) σ(o)
//
// T steps, batch B, hidden size H. All arrays are row-major and contiguous where nothing else is
// said. Three kinds: the product's, of its operands; the state's, of what is kept and returned; and
// the gates', in which sums are made: double if the product's is, otherwise float. On the CPU all
// three are one.
//
// sequence.h has what Rust hands over.
#pragma once

#include "tch_extension/kind.h"

// One step behind its product.
struct LltmStepForward {
  int64_t batch;
  int64_t hidden;
  int32_t kind;              // TchExtensionKind of the state
  int32_t product_kind;      // of the products' operands
  const void* input_gates;   // [B, 3H], of the gates' kind
  const void* hidden_gates;  // [B, 3H], of the gates' kind
  const void* bias;          // [3H], of the gates' kind, null for zeros
  const void* c;             // [B, H]
  void* new_h;               // [B, H]
  void* new_c;               // [B, H]; may be c
  void* operand;             // [B, H], new_h in the product's kind; null if that is the state's
  void* activations;  // [B, 3H]: [σ(i) | σ(o) | g], null if nobody needs them; may be input_gates
};

// One step back, before its product.
struct LltmStepBackward {
  int64_t batch;
  int64_t hidden;
  int32_t kind;
  int32_t product_kind;
  const void* grad_output;  // [B, H], of the state's kind, null for zeros
  const void* grad_h;       // [B, H], of the gates' kind: from the step behind; null for zeros
  void* grad_c;             // [B, H], of the gates' kind: for c[t], and then for c[t-1]
  const void* activations;  // [B, 3H], of the state's kind
  const void* new_c;        // [B, H], of the state's kind
  void* grad_gates;         // [B, 3H], of the product's kind
};

// How the CPU's threads share a sequence: each has a place, a group of rows and a group of columns.
// Those of the same rows wait for one another after each step.
struct LltmTeam {
  int64_t row_groups;
  int64_t column_groups;
  int64_t* counters;  // [1 + row_groups + places, 8] zeros: of team.h; a cache line each
};

// All steps on the CPU, for double and float.
struct LltmPackedForward {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;  // from a row of W to the next, in elements
  int64_t c_stride;       // from a step's c to the next: B·H, or 0 if only the last one is needed
  int32_t kind;
  int32_t reserved;
  LltmTeam team;
  const void* weight;       // W_h, [3H, H]
  const void* input_gates;  // [T, B, 3H], with the bias
  const void* h0;           // [B, H]
  const void* c0;           // [B, H]
  void* output;             // [T, B, H]
  void* c;                  // [T, B, H], or [B, H] with c_stride 0
  void* activations;        // [T, B, 3H], null if nobody needs them; may be input_gates
  void* packed;             // scratch of 3H · H' values, H' = H rounded up to a multiple of 32
};

struct LltmPackedBackward {
  int64_t steps;
  int64_t batch;
  int64_t hidden;
  int64_t weight_stride;
  int32_t kind;
  int32_t needs_grad_h0;
  LltmTeam team;
  const void* weight;       // W_h, [3H, H]
  const void* grad_output;  // [T, B, H], null for zeros
  const void* activations;  // [T, B, 3H]
  const void* c;            // [T, B, H]
  void* grad_h;             // [B, H]: for h[T-1] beside the output's, and then for h0
  void* grad_c;             // [B, H]: for c[T-1], and then for c0
  void* grad_gates;         // [T, B, 3H]
  void* packed;             // scratch as in the forward
};
