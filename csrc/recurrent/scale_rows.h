// Rows of float as fp16 values, each row multiplied by a power of two. The kernels that keep W_h on
// the chip multiply these where libtorch allows tf32.
//
// An fp16 value has as many digits as tf32, 11 with the leading one, but only 30 binades. A
// multiplication by a power of two changes no digit, and takes the largest value of a row to [2^14,
// 2^15), the upper end of that range. Whatever is within 2^-28 of the largest is rounded as tf32
// rounds it (to nearest), and smaller values are off by at most 2^-39 of the largest, where tf32
// would keep their digits. Compared with the row's largest this is negligible: 2^-15 of the last
// digit of a float. The scale of the steps' h is fixed, because |h| < 1; its limits are 2^-29 and
// 2^-40 of 1. Compared with tf32, fp16 halves the bytes and doubles the products per clock.
//
// Infinities and NaN are unchanged, and have no influence on the scale of the row.
#pragma once

#include <cstdint>

namespace tch_extension::recurrent {

// h is sent as h times this; |h| < 1.
constexpr float kMessageScale = 1 << 15;

// The largest magnitude of a scaled row of W_h is between this and twice as much. In the backward
// pass a gradient for a gate is multiplied by its row's scale and by this value, which together is
// about the row's largest weight: the gradient then has the size of its contribution to dh, and
// underflows no sooner than that contribution.
constexpr float kWeightScale = 1 << 14;

// The limit within which a scale and its inverse are both normal floats.
constexpr int kMostExponent = 126;

struct ScaledRows {
  int64_t rows;
  int64_t stride;     // from a row to the next, in elements
  int64_t to_stride;  // at least as many as columns; those after the columns become zeros
  const float* from;  // [rows, columns]
  void* to;           // fp16 values
  float* scales;      // [rows]: the factor that undoes the scaling of a row
  // The exponent for a row of zeros. In the backward pass gradients are multiplied by the scale
  // before the largest of them is determined: there a row of zeros has the smallest scale,
  // 2^-kMostExponent, because a gradient that is multiplied only with zeros must not be the
  // largest.
  int64_t exponent_of_zeros;
};

struct ScaleRows {
  int64_t columns;
  ScaledRows matrices[2];  // the second may have no rows
};

}  // namespace tch_extension::recurrent
