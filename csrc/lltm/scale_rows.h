// Rows of float as halves, each row times a power of two: what the kernels that keep W_h on chip multiply
// where libtorch allows tf32.
//
// A half has as many digits as tf32, 11 with the leading one, but only 30 binades. Times a power of two,
// which changes no digit, the largest of a row is at the upper end of those: whatever is within 2^-29 of it
// is rounded as tf32 rounds it (to nearest), and what is smaller is off by no more than 2^-40 of it, where
// tf32 would keep its digits. Beside the row's largest that is nothing: 2^-16 of the last digit of a float.
// With half the bytes and twice the products a clock.
//
// Infinities and not-a-numbers stay what they are, and leave the scale to the other values of the row.
#pragma once

#include <cstdint>

namespace tch_extension {

// What h is sent as is h times this: it is within (-1, 1).
constexpr float kMessageScale = 1 << 15;

// The largest of a row of W_h as it is multiplied is about this. On the way back scales are times it, so that
// a gradient times its row's scale is as far from the smallest numbers as what becomes of it.
constexpr float kWeightScale = 1 << 14;

// So that a scale and its inverse are both normal floats.
constexpr int kMostExponent = 126;

}  // namespace tch_extension

struct LltmRows {
  int64_t rows;
  int64_t stride;     // from a row to the next, in elements
  int64_t to_stride;  // at least as many as columns; those behind the columns become zeros
  const float* from;  // [rows, columns]
  void* to;           // halves
  float* scales;      // [rows]: what a row has to be multiplied by to be what it was
  // The exponent for a row of zeros. On the way back others are multiplied by the scale, too: there it has to
  // be so small that what meets zeros only is never the largest.
  int64_t exponent_of_zeros;
};

struct LltmScaleRows {
  int64_t columns;
  LltmRows matrices[2];  // the second may have no rows
};
