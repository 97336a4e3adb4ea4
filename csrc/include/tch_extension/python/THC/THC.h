// Replaces a header that libtorch had until 1.10, with the parts that extensions use.
#pragma once

#include <ATen/ceil_div.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>

#define THCudaCheck(call) C10_CUDA_CHECK(call)

template <typename T>
T THCCeilDiv(T a, T b) {
  return at::ceil_div(a, b);
}
