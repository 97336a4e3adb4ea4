// The pointwise part of the LLTM cell; the products around it are libtorch's. src/ffi/lltm_cell.rs mirrors
// these structs, and a test compares sizes and offsets.
//
//   [i | o | g] = gates           before their activations
//   c' = c + elu(g) σ(i)          h' = tanh(c') σ(o)
//
// All arrays are row-major and contiguous; B is the batch, H the hidden size. No two may overlap. The half
// kinds are computed in float and rounded when stored.
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
