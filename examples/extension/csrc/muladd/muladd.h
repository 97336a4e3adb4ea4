// Checks that the kernels for the CPU and for CUDA share.
#pragma once

#include <ATen/core/Tensor.h>

namespace extension {

// Same shape, kind and device.
void check(const char* name, const at::Tensor& a, const at::Tensor& b);

// Where to write: as a, and contiguous.
void check_out(const char* name, const at::Tensor& a, const at::Tensor& out);

}  // namespace extension
