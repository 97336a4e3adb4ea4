// Rows of float as fp16 values, each row multiplied by a power of two. The kernels that keep W_h on
// the chip multiply these where libtorch allows tf32.
//
// An fp16 value has as many digits as tf32, 11 with the leading one, but only 30 binades. A
// multiplication by a power of two changes no digit, and takes the largest value of a row to [2^14,
// 2^15), the upper end of that range. Whatever is within 2^-28 of the largest is rounded as tf32
// rounds it (to nearest), and smaller values are off by at most 2^-39 of the largest, where tf32
// would keep their digits. Compared with the row's largest this is negligible: 2^-15 of the last
// digit of a float. The scale of the steps' h is fixed, because |h| < 1; its limits are 2^-29 and
// 2^-40 of 1. A GRU's |h| is bounded by 1 or the largest of its h0, and its scale is that of h0, if
// that is smaller. Compared with tf32, fp16 halves the bytes and doubles the products per clock.
//
// Infinities and NaN are unchanged, and have no influence on the scale of the row.
#pragma once

#include "params.h"

namespace tch_extension::recurrent {

// h is sent as h times this, or by a GRU as h times a smaller power of two.
constexpr float kMessageScale = 1 << 15;

// The largest magnitude of a scaled row of W_h is between this and twice as much. In the backward
// pass a gradient for a gate is multiplied by its row's scale and by this value, which together is
// about the row's largest weight: the gradient then has the size of its contribution to dh, and
// underflows no sooner than that contribution.
constexpr float kWeightScale = 1 << 14;

// The limit within which a scale and its inverse are both normal floats.
constexpr int kMostExponent = 126;

using ScaledRows = ::RecurrentScaledRows;
using ScaleRows = ::RecurrentScaleRows;

}  // namespace tch_extension::recurrent
