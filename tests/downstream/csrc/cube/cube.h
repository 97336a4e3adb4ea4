// The gradient of x³, computed with vectors as in the operators' kernels. On request, the kernel
// omits the last lane of the last vector, which a gradcheck must detect.
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
