// What Rust hands over for a whole sequence of LLTM: the tensors, and which way to take. Rust
// mirrors these structs, and a test compares sizes and offsets. Tensors are contiguous and of the
// shapes and kinds of recurrent/step/params.h.
#pragma once

#include <ATen/core/Tensor.h>

#include "tch_extension/kind.h"

// The ways, each by the folder of csrc/recurrent that it runs in.
enum LltmPath : int32_t {
  kLltmPerStep = 0,         // step
  kLltmPacked = 1,          // cpu
  kLltmFused = 2,           // one kernel of csrc/lltm_cell for each step
  kLltmPersistent = 3,      // cluster
  kLltmGrid = 4,            // grid, in half kinds or scaled fp16 values
  kLltmPersistentTf32 = 5,  // cluster, for float in scaled fp16 values
  kLltmWideGrid = 6,        // wide_grid, for many rows
  kLltmPlainGrid = 7,       // grid, for float and double as they are
  kLltmTensorCores = 8,     // forward: one tensor-core kernel of csrc/lltm_cell for each step
};

struct LltmForward {
  int32_t path;
  // How many groups share the rows of the batch: on the CPU, and in a grid.
  int32_t row_groups;
  // On the CPU, how many groups share the columns of h; by clusters, how many blocks share rows; by
  // a grid, how many columns of h a block has.
  int32_t column_groups;
  // Whether the input is multiplied for all steps first. Only the ways that call a kernel of the
  // cell for each step can do without (kLltmFused, and kLltmTensorCores, which does).
  int32_t input_at_once;
  void* stream;              // libtorch's current one on CUDA
  const at::Tensor* input;   // [T, B, F], of the product's kind
  const at::Tensor* weight;  // [3H, H + F], of the product's kind
  // [3H], of the gates' kind; for kernels of the cell, of the product's; may be null
  const at::Tensor* bias;
  const at::Tensor* h0;  // [B, H], of the product's kind
  const at::Tensor* c0;  // [B, H], of the state's kind
  at::Tensor* gates;     // [T, B, 3H], of the gates' kind: scratch; null if not input_at_once
  at::Tensor* output;    // [T, B, H], of the state's kind
  at::Tensor* c;         // the same, or [1, B, H] for the last only
  // [T, B, 3H], of the state's kind; may be `gates`; null if nobody needs them
  at::Tensor* activations;
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
