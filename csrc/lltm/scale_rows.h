// Rows of float as halves, each row times a power of two: what the kernels that keep W_h on chip multiply
// where libtorch allows tf32.
//
// A half has as many digits as tf32, 11 with the leading one, but only 30 binades. Times a power of two,
// which changes no digit, the largest of a row is at the upper end of those: whatever is within 2^-29 of it
// is rounded as tf32 rounds it (to nearest), and what is smaller by no more than 2^-40 of it. So nothing is
// less exact than in tf32, with half the bytes and twice the products a clock.
//
// Infinities and not-a-numbers stay what they are, and leave the scale to the other values of the row.
#pragma once

#include <cstdint>

namespace tch_extension {

// What h is sent as is h times this: it is within (-1, 1).
constexpr float kMessageScale = 1 << 15;

}  // namespace tch_extension

struct LltmRows {
  int64_t rows;
  int64_t stride;     // from a row to the next, in elements
  int64_t to_stride;  // at least as many as columns; those behind the columns become zeros
  const float* from;  // [rows, columns]
  void* to;           // halves
  float* scales;      // [rows]: what a row has to be multiplied by to be what it was
};

struct LltmScaleRows {
  int64_t columns;
  LltmRows matrices[2];  // the second may have no rows
};
