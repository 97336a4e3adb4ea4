// Layer normalisation and its derivatives. src/ops/layer_norm/kernels.rs mirrors these structs, and
// a test compares sizes and offsets.
//
//   mean = Σ x / N      rstd = 1 / √(Σ (x - mean)² / N + eps)      x̂ = (x - mean) rstd
//   y = x̂ w + b
//   dx = rstd (g - Σ g / N - x̂ Σ g x̂ / N)   with g = dy w
//   dw = Σ dy x̂         db = Σ dy           over the rows
//
// All arrays are row-major and contiguous; M rows of N columns. No two may overlap. The half kinds
// are computed in float (the compute kind; otherwise that is the kind itself) and rounded when
// stored.
#pragma once

#include "tch_extension/kind.h"

// How rows are spread over threads on CUDA; chosen in src/ops/layer_norm/plan.rs. The CPU looks at
// none of it.
struct LayerNormPlan {
  int32_t in_registers;  // whether a row is read once and kept, or read again for each pass
  int32_t lanes;         // values loaded at a time: 16 bytes, or one value
  int32_t
      shifted;  // whether rows begin anywhere, and their 16 bytes are shifted out of aligned ones
  int32_t
      team;  // threads of a row, or of a block's part of it: a power of two; the block, for passes
  int32_t threads;  // of a block: several teams, or one
  int32_t cluster;  // blocks that share a row; 1 but for long ones
  int32_t
      stages;  // rows that a team has under way to shared memory; 0 where it loads to its registers
  int32_t early_finish;  // whether the kernel that adds up the parts may be started before its turn
  int32_t in_place;  // whether the backward's rows of an odd length stay where 16 bytes are read at
                     // a time: a team's rows all begin as far behind a multiple of them
  int32_t by_columns;  // whether dw and db are read from x and dy again: few rows, and no parts. If
                       // also in_registers, the backward's first kernel does all
};

// What plans ask of a GPU.
struct LayerNormDevice {
  int32_t processors;
  int32_t shared_memory;  // bytes of a block, at most
  int32_t clusters;       // whether blocks can share a row, and a kernel be started before its turn
};

struct LayerNormForward {
  int64_t rows;     // M
  int64_t columns;  // N
  double eps;
  int32_t kind;            // TchExtensionKind of input and output
  int32_t parameter_kind;  // of weight and bias: `kind`, or Float beside a half kind (CPU only)
  LayerNormPlan plan;
  const void* input;   // [M, N]
  const void* weight;  // [N], null for ones
  const void* bias;    // [N], null for zeros
  void* output;        // [M, N]
  void* mean;          // [M], compute kind, null when nobody needs it
  void* rstd;          // [M], compute kind, null when nobody needs it
};

struct LayerNormBackward {
  int64_t rows;
  int64_t columns;
  int64_t parts;  // P: into how many sums over rows the sums for weight and bias are cut
  int32_t kind;
  int32_t parameter_kind;
  LayerNormPlan plan;
  const void* grad_output;  // [M, N]
  const void* input;        // [M, N]
  const void* weight;       // [N], null for ones
  const void*
      mean;  // [M], compute kind; this and rstd are null when only the bias' gradient is asked for
  const void* rstd;    // [M], compute kind
  void* grad_input;    // [M, N], null when nobody needs it
  void* grad_weight;   // [N], parameter kind, null when nobody needs it
  void* grad_bias;     // [N], parameter kind, null when nobody needs it
  void* weight_parts;  // [P, N], compute kind: scratch, null without grad_weight
  void* bias_parts;    // [P, N], compute kind: scratch, null without grad_bias
};
