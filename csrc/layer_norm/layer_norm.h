// Layer normalisation and its derivatives. params.h has the structs.
//
//   mean = Σ x / N      rstd = 1 / √(Σ (x - mean)² / N + eps)      x̂ = (x - mean) rstd
//   y = x̂ w + b
//   dx = rstd (g - Σ g / N - x̂ Σ g x̂ / N)   with g = dy w
//   dw = Σ dy x̂         db = Σ dy           over the rows
//
// All arrays are row-major and contiguous; M rows of N columns. No two may overlap. The half kinds
// are computed in float (the compute kind; otherwise that is the kind itself) and rounded when
// stored.
#pragma once

#include "params.h"
#include "tch_extension/kind.h"
