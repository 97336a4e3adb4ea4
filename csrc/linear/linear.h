// The bias' gradient of a linear layer; its products are computed by libtorch or csrc/gemm.
// params.h has the parameter struct.
//
//   db = Σ dY over the rows
//
// The half kinds are accumulated in float and rounded once.
#pragma once

#include "params.h"
