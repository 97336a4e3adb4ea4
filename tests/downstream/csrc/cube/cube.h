// The gradient of x³, with vectors as the operators' kernels have them. On request it forgets the
// last lane of the last vector: what a gradcheck must notice.
#pragma once

#include "tch_extension/kind.h"

struct CubeBackward {
  int64_t len;
  int32_t kind;    // TchExtensionKind of every array
  int32_t broken;  // whether the last element's gradient is left out
  const void* x;
  const void* grad;
  void* grad_x;
};
