// The bias' gradient of a linear layer; its products are libtorch's or csrc/gemm's. params.h has
// the struct.
//
//   db = Σ dY over the rows
//
// Sums of the half kinds are made in float and rounded once.
#pragma once

#include "params.h"
