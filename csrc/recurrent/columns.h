// The left operand of all steps, transposed: [h[t-1] | x[t]]ᵀ, so that a product whose terms run
// over steps and rows finds them adjacent in memory. `wgmma` takes tf32 from shared memory in no
// other order, and the kernels that cuBLAS has for the untransposed operand take 1.4 to 1.9 times
// as long.
#pragma once

#include <cstdint>

namespace tch_extension::recurrent {

struct Columns {
  int64_t batch;
  int64_t rows;  // T·B
  int64_t hidden;
  int64_t features;
  int64_t to_stride;    // from a column to the next; at least `rows`, and zeros behind those
  const float* h0;      // [B, H]
  const float* output;  // [T, B, H]
  const float* input;   // [T, B, F]
  float* to;            // [H + F, to_stride]
};

}  // namespace tch_extension::recurrent
