// The LLTM cell. params.h has the parameter structs: LltmCellForward and LltmCellBackward for the
// pointwise part, whose products libtorch computes, and LltmCellFusedForward and
// LltmCellFusedBackward for the whole cell in one kernel, at sizes where launches cost more than
// arithmetic (fused_forward.cu, fused_backward.cu and cpu_fused.cpp).
//
//   [i | o | g] = gates           before their activations; fused: [h, x] Wᵀ + b
//   c' = c + elu(g) σ(i)          h' = tanh(c') σ(o)
//
// Arrays are row-major, and contiguous unless params.h gives them a stride. No two may overlap
// unless params.h allows it. B is the batch size, H the hidden size. The half kinds are computed in
// float and rounded when stored.
#pragma once

#include "params.h"
#include "tch_extension/kind.h"
