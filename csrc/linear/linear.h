// The bias' gradient of a linear layer, also while the gradients of parts of its output are
// concatenated; its products are computed by libtorch or csrc/gemm.
// params.h has the parameter struct.
//
//   db = Σ dY over the rows
//
// The half kinds are accumulated in float and rounded once.
#pragma once

#include "params.h"
