// The pointwise part of the LLTM cell; the products around it are libtorch's.
// src/ops/lltm_cell/kernels/pointwise.rs mirrors these structs, and a test compares sizes and
// offsets.
//
//   [i | o | g] = gates           before their activations
//   c' = c + elu(g) σ(i)          h' = tanh(c') σ(o)
//
// All arrays are row-major and contiguous; B is the batch, H the hidden size. No two may overlap.
// The half kinds are computed in float and rounded when stored.
#pragma once

#include "tch_extension/kind.h"

struct LltmCellForward {
  int64_t batch;             // B
  int64_t hidden;            // H
  int32_t kind;              // TchExtensionKind of every array
  int32_t save_activations;  // whether `gates` is overwritten by [σ(i) | σ(o) | g]
  void* gates;               // [B, 3H]
  const void* c;             // [B, H]
  void* new_h;               // [B, H]
  void* new_c;               // [B, H]
  void* output;  // [B, H], new_h again: of a sequence of one step; null when nobody needs it
};

struct LltmCellBackward {
  int64_t batch;
  int64_t hidden;
  int32_t kind;
  int32_t reserved;
  const void* grad_new_h;   // [B, H], null for zeros
  const void* grad_new_c;   // [B, H], null for zeros
  const void* activations;  // [B, 3H]: [σ(i) | σ(o) | g]
  const void* new_c;        // [B, H]
  void* grad_gates;         // [B, 3H]
  void* grad_c;             // [B, H], null when nobody needs it
};

// The whole cell in one kernel, for sizes at which launches cost more than arithmetic:
// fused_forward.cu, fused_backward.cu and cpu_fused.cpp.
//
//   [i | o | g] = [h, x] Wᵀ + b
//
// All arrays have one kind. Rows of what is read lie `…_stride` elements apart, the elements of a
// row side by side; what is written is contiguous. F is the number of features, K = H + F.
struct LltmCellFusedForward {
  int64_t batch;     // B, at least 1
  int64_t features;  // F, may be 0
  int64_t hidden;    // H, at least 1
  int32_t kind;
  int32_t vectors;  // whether 16 bytes are loaded at a time: sizes, strides and addresses allow it
  const void* input;  // [B, F]
  int64_t input_stride;
  const void* weight;  // [3H, K], the columns for h and x
  int64_t weight_stride;
  const void* bias;  // [3H], null for zeros
  const void* h;     // [B, H]
  int64_t h_stride;
  const void* c;  // [B, H]
  int64_t c_stride;
  void* new_h;        // [B, H]
  void* new_c;        // [B, H]; may be c, for a sequence that keeps the last one
  void* activations;  // [B, 3H]: [σ(i) | σ(o) | g], null when nobody needs them
  // Only on CUDA, for a sequence: [B, 3H], added to the gates, in the type that sums are made in;
  // null for zeros. May be `activations`.
  const void* input_gates;
  void* output;  // [B, H], new_h again: of a sequence of one step; null when nobody needs it
};

// Its backward, also one kernel.
struct LltmCellFusedBackward {
  int64_t batch;
  int64_t features;
  int64_t hidden;
  int32_t kind;
  int32_t wide;  // whether grad_new_c, grad_behind, grad_h and grad_c are of the type that sums are
                 // made in
  const void* grad_new_h;   // [B, H], null for zeros
  const void* grad_new_c;   // [B, H], null for zeros
  const void* activations;  // [B, 3H]
  const void* new_c;        // [B, H]
  const void* input;        // [B, F], null without grad_weight, as h
  int64_t input_stride;
  const void* h;  // [B, H]
  int64_t h_stride;
  const void* weight;  // [3H, K], null without grad_input and grad_h
  int64_t weight_stride;
  void* grad_input;   // [B, F]; each of these is null when nobody needs it
  void* grad_weight;  // [3H, K]
  void* grad_bias;    // [3H]
  void* grad_h;       // [B, H]
  void* grad_c;       // [B, H]
  // Only on CUDA, for a sequence, which needs no grad_weight and grad_bias of a single step.
  const void* grad_behind;  // [B, H], added to grad_new_h; null for zeros
  void* grad_gates;         // [B, 3H], null when nobody needs them; needs grad_h
};
