// Layer normalisation and its derivatives. params.h has the structs.
//
//   mean = Σ x / N      rstd = 1 / √(Σ (x - mean)² / N + eps)      x̂ = (x - mean) rstd
//   y = x̂ w + b
//   dx = rstd (g - Σ g / N - x̂ Σ g x̂ / N)   with g = dy w
//   dw = Σ dy x̂         db = Σ dy           over the rows
//
// All arrays are row-major and contiguous, with M rows of N columns. No two may overlap.
// Half-precision values are computed in float and rounded when stored. The kind in which values are
// computed is the compute kind: float for half precision, otherwise the kind itself.
#pragma once

#include "params.h"
#include "tch_extension/kind.h"
