// Rotary position embedding of the heads of q and k. A head of D values has R / 2 pairs (a, b),
// each of which is rotated by the angle of its token and its place i:
//
//   a' = a cos[t, i] - b sin[t, i]
//   b' = b cos[t, i] + a sin[t, i]
//
// The pair with place i is (i, i + R / 2) or, if pairs are interleaved, (2i, 2i + 1). The remaining
// D - R values stay as they are. The gradient is the inverse rotation, which has -sin. Half kinds
// are computed in float and rounded once.
//
// Floor: each value of q and k is read once and written once. The tables are T·R values for all
// heads and all sequences of the batch, which the L2 cache serves.
#pragma once

#include "params.h"
