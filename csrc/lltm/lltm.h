// Whole sequences, as Rust hands them over: the tensors, and which way to take. src/ffi/lltm.rs
// mirrors these structs, and a test compares sizes and offsets. Tensors are contiguous and of the
// shapes and kinds of recurrent/step/params.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "tch_extension/kind.h"

enum LltmPath : int32_t {
  kLltmPerStep = 0,
  kLltmPacked = 1,
  kLltmFused = 2,  // one kernel a step
  kLltmPersistent = 3,
  kLltmGrid = 4,
  kLltmPersistentTf32 = 5,  // of float, in halves that are scaled
  kLltmWideGrid = 6,        // for many rows
  kLltmPlainGrid = 7,       // for float and double as they are
  kLltmTensorCores = 8,     // one kernel a step, of the cell, forward
};

struct LltmForward {
  int32_t path;
  int32_t row_groups;       // of the packed path and the grid
  int32_t column_groups;    // of the packed path; of the persistent one, blocks that share rows; of
                            // the grid, columns of a block
  int32_t input_at_once;    // whether the input is multiplied for all steps first; only the fused
                            // path can do without, and that of tensor cores does
  void* stream;             // libtorch's current one on CUDA
  const at::Tensor* input;  // [T, B, F], of the product's kind
  const at::Tensor* weight;  // [3H, H + F], of the product's kind
  const at::Tensor*
      bias;  // [3H], of the gates' kind, of the product's for kernels of the cell; may be null
  const at::Tensor* h0;  // [B, H], of the product's kind
  const at::Tensor* c0;  // [B, H], of the state's kind
  at::Tensor* gates;     // [T, B, 3H], of the gates' kind: scratch; null if not input_at_once
  at::Tensor* output;    // [T, B, H], of the state's kind
  at::Tensor* c;         // the same, or [1, B, H] for the last only
  at::Tensor*
      activations;  // [T, B, 3H], of the state's kind; may be `gates`; null if nobody needs them
};

struct LltmBackward {
  int32_t path;
  int32_t row_groups;
  int32_t column_groups;
  int32_t needs_grad_h0;
  void* stream;
  const at::Tensor* weight;       // [3H, H + F], of the product's kind
  const at::Tensor* grad_output;  // [T, B, H], of the state's kind; may be null
  const at::Tensor* activations;  // [T, B, 3H], of the state's kind
  const at::Tensor* c;            // [T, B, H], of the state's kind
  at::Tensor* grad_h;             // [B, H], of the gates' kind: for h[T-1], and then for h0
  at::Tensor* grad_c;             // [B, H], of the gates' kind: for c[T-1], and then for c0
  at::Tensor* grad_gates;         // [T, B, 3H], of the product's kind
};
