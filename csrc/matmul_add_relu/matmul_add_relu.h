// What surrounds the product of matmul_add_relu; the products are libtorch's.
// src/ops/matmul_add_relu/kernels.rs mirrors these structs, and a test compares sizes and offsets.
//
//   out = relu(product + bias)        dZ = dout where not out <= 0, otherwise 0        db = Σ dZ
//   over the rows
//
// NaN goes through in both directions, as in libtorch's relu. The half kinds are computed in float
// and rounded when stored; their sums are made in float and rounded once.
#pragma once

#include "tch_extension/column_sums.h"

enum { kMatmulAddReluDims = 6 };

struct MatmulAddReluForward {
  int64_t size[kMatmulAddReluDims];  // of out, innermost first; 1 where there is no such dimension
  int64_t product_stride[kMatmulAddReluDims];  // in elements; 0 where it is broadcast
  int64_t bias_stride[kMatmulAddReluDims];     // in elements; 0 where it is broadcast
  int32_t kind;                                // TchExtensionKind of every array
  int32_t dims;                                // how many of the sizes count, at least 1
  const void* product;                         // may be `out`, if it has its strides
  const void* bias;
  void* out;  // contiguous
};

struct MatmulAddReluBackward {
  TchExtensionColumnSums
      sums;      // M rows, N columns; sums.sums is db, [N], or null when nobody needs it
  int32_t kind;  // TchExtensionKind of every array
  int32_t reserved;
  const void* grad;    // dout, [M, N]
  const void* out;     // [M, N]
  void* grad_product;  // dZ, [M, N]
};
