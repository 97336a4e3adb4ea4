// What follows the product of matmul_add_relu, and its backward; the products are computed by
// libtorch or csrc/gemm. params.h has the parameter structs.
//
//   out = relu(product + bias)
//   dZ = dout where not out <= 0, otherwise 0
//   db = Σ dZ over the rows
//
// NaN propagates in both directions, as in libtorch's relu. The half kinds are computed in float
// and rounded when stored; their sums are accumulated in float and rounded once.
#pragma once

#include "params.h"
