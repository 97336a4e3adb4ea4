// What follows the product of matmul_add_relu, and the backward of that; the products are
// libtorch's or csrc/gemm's. params.h has the structs.
//
//   out = relu(product + bias)        dZ = dout where not out <= 0, otherwise 0        db = Σ dZ
//   over the rows
//
// NaN goes through in both directions, as in libtorch's relu. The half kinds are computed in float
// and rounded when stored; their sums are made in float and rounded once.
#pragma once

#include "params.h"
