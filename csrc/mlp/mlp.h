// What stands between the products of gelu_mlp and swiglu_mlp, forward and backward; the products
// are computed by libtorch or csrc/gemm. params.h has the parameter structs.
//
//   a = act(z)         dz = da act'(z)                                    db = Σ dz over the rows
//   h = silu(g) u      dg = dh u silu'(g)      du = dh silu(g)
//
// NaN and infinity give what libtorch's gelu, relu and square, silu give. The half kinds are
// computed in float and rounded when stored; the sums are those of values that are not rounded.
#pragma once

#include "params.h"
