// CUDA kernels of the operators that muladd.cpp defines. A `.cu` file may include torch's headers;
// the fewer it includes, the faster it compiles.

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "muladd.h"
#include "tch_extension/launch.h"

namespace extension {
namespace {

struct MulAdd {
  double c;
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a * b + static_cast<T>(c);
  }
};
struct Mul {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a * b;
  }
};
struct Add {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};

template <typename T, typename Body>
__global__ void for_each_kernel(int64_t count, const T* a, const T* b, T* out, Body body) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; index < count;
       index += step) {
    out[index] = body(a[index], b[index]);
  }
}

template <typename Body>
void for_each(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, Body body) {
  if (a.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(a.device());
  const at::Tensor a_values = a.contiguous(), b_values = b.contiguous();
  const unsigned blocks = tch_extension::blocks_for(a.numel());
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "extension_example", [&] {
    for_each_kernel<<<blocks, tch_extension::kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        a.numel(), a_values.const_data_ptr<scalar_t>(), b_values.const_data_ptr<scalar_t>(),
        out.mutable_data_ptr<scalar_t>(), body);
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

at::Tensor muladd_cuda(const at::Tensor& a, const at::Tensor& b, double c) {
  check("muladd", a, b);
  at::Tensor out = at::empty(a.sizes(), a.options());
  for_each(a, b, out, MulAdd{c});
  return out;
}

at::Tensor mul_cuda(const at::Tensor& a, const at::Tensor& b) {
  check("mul", a, b);
  at::Tensor out = at::empty(a.sizes(), a.options());
  for_each(a, b, out, Mul());
  return out;
}

void add_out_cuda(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  check("add_out", a, b);
  check_out("add_out", a, out);
  for_each(a, b, out, Add());
}

}  // namespace
}  // namespace extension

TORCH_LIBRARY_IMPL(extension_example, CUDA, m) {
  m.impl("muladd", &extension::muladd_cuda);
  m.impl("mul", &extension::mul_cuda);
  m.impl("add_out", &extension::add_out_cuda);
}
