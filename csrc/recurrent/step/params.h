// The parameters of one step that is computed by kernels of its own.
//
// These are for whole sequences of a recurrent cell. The product with the input is computed for all
// steps at once before the first step. Each step then computes the product with the preceding
// step's h, and the cell:
//
//   [i | o | g] = input_gates[t] + h[t-1] W_hᵀ + b        before their activations
//   c[t] = c[t-1] + elu(g) σ(i)        h[t] = tanh(c[t]) σ(o)
//
// There are T steps, the batch size is B and the hidden size is H. All arrays are row-major and
// contiguous unless stated otherwise. There are three kinds: the product's kind is that of its
// operands; the state's kind is that of what is kept and returned; and the gates' kind is the one
// in which sums are computed, which is double if the product's is double, and float otherwise. On
// the CPU all three are the same.
#pragma once

#include "tch_extension/kind.h"

namespace tch_extension::recurrent::step {

// One step forward, after its product.
struct ForwardParams {
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

// One step backward, before its product.
struct BackwardParams {
  int64_t batch;
  int64_t hidden;
  int32_t kind;
  int32_t product_kind;
  const void* grad_output;  // [B, H], of the state's kind, null for zeros
  const void* grad_h;       // [B, H], of the gates' kind: from the next step; null for zeros
  void* grad_c;             // [B, H], of the gates' kind: on entry for c[t], on return for c[t-1]
  const void* activations;  // [B, 3H], of the state's kind
  const void* new_c;        // [B, H], of the state's kind
  void* grad_gates;         // [B, 3H], of the product's kind
};

}  // namespace tch_extension::recurrent::step
