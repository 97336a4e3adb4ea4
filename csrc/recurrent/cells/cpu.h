// What a cell's functions on the CPU take: vectors of adjacent columns of one row, and where in
// memory the rest is. cell.h describes what a cell is.
#pragma once

#include "lltm_pointwise.h"
#include "tch_extension/cpu.h"

namespace tch_extension::recurrent {
inline namespace CPU_CAPABILITY {

// Where a step reads and writes `count` adjacent columns of a row. The several values of a column
// are `hidden` values apart.
template <typename T>
struct ForwardPlace {
  const T* state;  // before the step
  T* new_h;
  T* new_state;  // not written where the state is h
  T* saved;      // null if nobody needs it
  int64_t hidden;
  int64_t count;
};

template <typename T>
struct BackwardPlace {
  const T* saved;
  const T* state;      // before the step; null unless the cell needs it
  const T* new_state;  // after it
  T* grad_state;       // on entry for the state after the step, on return for the one before
  T* grad_gates;       // for what the product with W_h is added to
  T* grad_separate;    // for the input's part of the separate gates; null without any
  int64_t hidden;
  int64_t count;
};

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent
