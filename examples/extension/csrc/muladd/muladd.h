// Checks that the CPU and the CUDA kernels share.
#pragma once

#include <ATen/core/Tensor.h>

namespace extension {

// Checks that a and b have the same shape, kind and device.
void check(const char* name, const at::Tensor& a, const at::Tensor& b);

// Checks that out has a's shape, kind and device and is contiguous.
void check_out(const char* name, const at::Tensor& a, const at::Tensor& out);

}  // namespace extension
