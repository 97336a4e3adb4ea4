// The kernel of clip.cpp in the style of 2019: it includes only headers of ATen and THC.
#include <ATen/ATen.h>
#include <THC/THC.h>
#include <cuda.h>
#include <cuda_runtime.h>

template <typename scalar_t>
__global__ void clip_kernel(const scalar_t* x, scalar_t* y, scalar_t most, size_t size) {
  const size_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < size) {
    y[i] = x[i] < most ? x[i] : most;
  }
}

at::Tensor clip_cuda(at::Tensor x, double most) {
  auto y = at::empty_like(x);
  const int threads = 256;
  const int blocks = THCCeilDiv<int>(x.numel(), threads);
  AT_DISPATCH_FLOATING_TYPES_AND_HALF(
      x.type(), "clip_cuda", ([&] {
        clip_kernel<scalar_t><<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data<scalar_t>(), y.data<scalar_t>(), static_cast<scalar_t>(most), x.numel());
      }));
  THCudaCheck(cudaGetLastError());
  return y;
}
