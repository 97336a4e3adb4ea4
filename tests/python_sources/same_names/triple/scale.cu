#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAStream.h>

#include "scale.h"

// The address of its stub decides which of two kernels with the same name is launched.
template <typename scalar_t>
__global__ void scale_kernel(const scalar_t* x, scalar_t* y, int64_t size) {
  const int64_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) {
    y[i] = x[i] * 3;
  }
}

at::Tensor scale_cuda(const at::Tensor& x) {
  at::Tensor y = at::empty_like(x);
  const unsigned blocks = (x.numel() + 255) / 256;
  scale_kernel<double><<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.const_data_ptr<double>(), y.mutable_data_ptr<double>(), x.numel());
  return y;
}
