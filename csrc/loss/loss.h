// The cross-entropy of rows of logits, and its gradient. For a row z of V logits with target t,
// weights w, smoothing e, and a weight k of the square of lse:
//
//   lse = log Σ exp z              p = exp(z - lse)             W = Σ w
//   loss = (1 - e) w[t] (lse - z[t]) + e / V (W lse - Σ w z) + k lse²
//   d loss / d z[c] = ((1 - e) w[t] + e / V W + 2 k lse) p[c] - [c = t] (1 - e) w[t] - e / V w[c]
//
// The first two terms depend on differences of logits only, and are computed from them: from
// lse - m, z[t] - m and Σ w (z - m), where m is the largest logit. lse and Σ w z themselves would
// lose the digits of a loss that is small compared with the logits.
//
// With a softcap s, z = s tanh(y / s) of a row y, and d z / d y = 1 - (z / s)². A row whose target
// is ignore_index has a loss and a gradient of zero. Half-precision logits are computed in float,
// and gradients are rounded once.
#pragma once

#include "params.h"
