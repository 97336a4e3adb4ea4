// Rows of float as halves, each row times a power of two: what the kernels that keep W_h on chip
// multiply where libtorch allows tf32.
//
// A half has as many digits as tf32, 11 with the leading one, but only 30 binades. Times a power of
// two, which changes no digit, the largest of a row is in [2^14, 2^15), the upper end of those:
// whatever is within 2^-28 of it is rounded as tf32 rounds it (to nearest), and what is smaller is
// off by no more than 2^-39 of it, where tf32 would keep its digits. Beside the row's largest that
// is nothing: 2^-15 of the last digit of a float. The scale of the steps' h is fixed, because |h| <
// 1: there the limits are 2^-29 and 2^-40 of 1. With half the bytes and twice the products a clock.
//
// Infinities and not-a-numbers stay what they are, and leave the scale to the other values of the
// row.
#pragma once

#include <cstdint>

namespace tch_extension::recurrent {

// What h is sent as is h times this: it is within (-1, 1).
constexpr float kMessageScale = 1 << 15;

// The largest of a scaled row of W_h is this, or up to twice as much. On the way back a gradient
// for a gate is multiplied by its row's scale and by this, which is about the row's largest weight:
// it then has the size of what it adds to dh, and is lost no sooner than that.
constexpr float kWeightScale = 1 << 14;

// So that a scale and its inverse are both normal floats.
constexpr int kMostExponent = 126;

struct ScaledRows {
  int64_t rows;
  int64_t stride;     // from a row to the next, in elements
  int64_t to_stride;  // at least as many as columns; those behind the columns become zeros
  const float* from;  // [rows, columns]
  void* to;           // halves
  float* scales;      // [rows]: what a row has to be multiplied by to be what it was
  // The exponent for a row of zeros. On the way back gradients are multiplied by the scale before
  // the largest of them is looked for: there a row of zeros has the smallest scale,
  // 2^-kMostExponent, because a gradient that meets only zeros must not be the largest.
  int64_t exponent_of_zeros;
};

struct ScaleRows {
  int64_t columns;
  ScaledRows matrices[2];  // the second may have no rows
};

}  // namespace tch_extension::recurrent
