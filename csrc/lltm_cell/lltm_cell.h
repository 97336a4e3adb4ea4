// The LLTM cell. params.h has the structs: LltmCellForward and LltmCellBackward for the pointwise
// part, around which the products are libtorch's, and LltmCellFusedForward and
// LltmCellFusedBackward for the whole cell in one kernel, for sizes at which launches cost more
// than arithmetic (fused_forward.cu, fused_backward.cu and cpu_fused.cpp).
//
//   [i | o | g] = gates           before their activations; fused: [h, x] Wᵀ + b
//   c' = c + elu(g) σ(i)          h' = tanh(c') σ(o)
//
// All arrays are row-major and contiguous; B is the batch, H the hidden size. No two may overlap.
// The half kinds are computed in float and rounded when stored.
#pragma once

#include "params.h"
#include "tch_extension/kind.h"
