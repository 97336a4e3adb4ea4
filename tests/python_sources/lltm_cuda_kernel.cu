// Kernels of the LLTM cell with packed accessors, written for torch.utils.cpp_extension.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/extension.h>

#include <vector>

namespace {

template <typename scalar_t, size_t dims>
using Accessor = torch::PackedTensorAccessor32<scalar_t, dims, torch::RestrictPtrTraits>;

template <typename scalar_t>
__device__ __forceinline__ scalar_t sigmoid(scalar_t z) {
  return 1.0 / (1.0 + exp(-z));
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t d_sigmoid(scalar_t z) {
  const auto s = sigmoid(z);
  return (1.0 - s) * s;
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t d_tanh(scalar_t z) {
  const auto t = tanh(z);
  return 1 - (t * t);
}

// Computed in the precision of scalar_t: fmaxf here would round doubles to floats.
template <typename scalar_t>
__device__ __forceinline__ scalar_t elu(scalar_t z) {
  return z > 0 ? z : static_cast<scalar_t>(expm1(z));
}

template <typename scalar_t>
__device__ __forceinline__ scalar_t d_elu(scalar_t z) {
  return z > 0 ? static_cast<scalar_t>(1) : static_cast<scalar_t>(exp(z));
}

template <typename scalar_t>
__global__ void forward_kernel(const Accessor<scalar_t, 3> gates,
                               const Accessor<scalar_t, 2> old_cell, Accessor<scalar_t, 2> new_h,
                               Accessor<scalar_t, 2> new_cell, Accessor<scalar_t, 2> input_gate,
                               Accessor<scalar_t, 2> output_gate,
                               Accessor<scalar_t, 2> candidate_cell) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < gates.size(2)) {
    input_gate[n][c] = sigmoid(gates[n][0][c]);
    output_gate[n][c] = sigmoid(gates[n][1][c]);
    candidate_cell[n][c] = elu(gates[n][2][c]);
    new_cell[n][c] = old_cell[n][c] + candidate_cell[n][c] * input_gate[n][c];
    new_h[n][c] = tanh(new_cell[n][c]) * output_gate[n][c];
  }
}

template <typename scalar_t>
__global__ void backward_kernel(Accessor<scalar_t, 2> d_old_cell, Accessor<scalar_t, 3> d_gates,
                                const Accessor<scalar_t, 2> grad_h,
                                const Accessor<scalar_t, 2> grad_cell,
                                const Accessor<scalar_t, 2> new_cell,
                                const Accessor<scalar_t, 2> input_gate,
                                const Accessor<scalar_t, 2> output_gate,
                                const Accessor<scalar_t, 2> candidate_cell,
                                const Accessor<scalar_t, 3> gates) {
  const int n = blockIdx.y;
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c < d_gates.size(2)) {
    const auto d_output_gate = tanh(new_cell[n][c]) * grad_h[n][c];
    const auto d_new_cell =
        d_tanh(new_cell[n][c]) * output_gate[n][c] * grad_h[n][c] + grad_cell[n][c];
    d_old_cell[n][c] = d_new_cell;
    d_gates[n][0][c] = candidate_cell[n][c] * d_new_cell * d_sigmoid(gates[n][0][c]);
    d_gates[n][1][c] = d_output_gate * d_sigmoid(gates[n][1][c]);
    d_gates[n][2][c] = input_gate[n][c] * d_new_cell * d_elu(gates[n][2][c]);
  }
}

template <typename scalar_t, size_t dims>
Accessor<scalar_t, dims> accessor(const torch::Tensor& tensor) {
  return tensor.packed_accessor32<scalar_t, dims, torch::RestrictPtrTraits>();
}

}  // namespace

std::vector<torch::Tensor> lltm_cuda_forward(torch::Tensor input, torch::Tensor weights,
                                             torch::Tensor bias, torch::Tensor old_h,
                                             torch::Tensor old_cell) {
  const c10::cuda::CUDAGuard guard(input.device());
  auto X = torch::cat({old_h, input}, /*dim=*/1);
  const auto batch_size = old_cell.size(0);
  const auto state_size = old_cell.size(1);
  auto gates = torch::addmm(bias, X, weights.transpose(0, 1)).reshape({batch_size, 3, state_size});
  auto new_h = torch::zeros_like(old_cell);
  auto new_cell = torch::zeros_like(old_cell);
  auto input_gate = torch::zeros_like(old_cell);
  auto output_gate = torch::zeros_like(old_cell);
  auto candidate_cell = torch::zeros_like(old_cell);

  const int threads = 1024;
  const dim3 blocks((state_size + threads - 1) / threads, batch_size);
  AT_DISPATCH_FLOATING_TYPES(
      gates.scalar_type(), "lltm_forward_cuda", ([&] {
        forward_kernel<scalar_t><<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
            accessor<scalar_t, 3>(gates), accessor<scalar_t, 2>(old_cell),
            accessor<scalar_t, 2>(new_h), accessor<scalar_t, 2>(new_cell),
            accessor<scalar_t, 2>(input_gate), accessor<scalar_t, 2>(output_gate),
            accessor<scalar_t, 2>(candidate_cell));
      }));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return {new_h, new_cell, input_gate, output_gate, candidate_cell, X, gates};
}

std::vector<torch::Tensor> lltm_cuda_backward(torch::Tensor grad_h, torch::Tensor grad_cell,
                                              torch::Tensor new_cell, torch::Tensor input_gate,
                                              torch::Tensor output_gate,
                                              torch::Tensor candidate_cell, torch::Tensor X,
                                              torch::Tensor gates, torch::Tensor weights) {
  const c10::cuda::CUDAGuard guard(grad_h.device());
  auto d_old_cell = torch::zeros_like(new_cell);
  auto d_gates = torch::zeros_like(gates);
  const auto batch_size = new_cell.size(0);
  const auto state_size = new_cell.size(1);

  const int threads = 1024;
  const dim3 blocks((state_size + threads - 1) / threads, batch_size);
  AT_DISPATCH_FLOATING_TYPES(
      X.scalar_type(), "lltm_backward_cuda", ([&] {
        backward_kernel<scalar_t><<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
            accessor<scalar_t, 2>(d_old_cell), accessor<scalar_t, 3>(d_gates),
            accessor<scalar_t, 2>(grad_h), accessor<scalar_t, 2>(grad_cell),
            accessor<scalar_t, 2>(new_cell), accessor<scalar_t, 2>(input_gate),
            accessor<scalar_t, 2>(output_gate), accessor<scalar_t, 2>(candidate_cell),
            accessor<scalar_t, 3>(gates));
      }));
  C10_CUDA_KERNEL_LAUNCH_CHECK();

  auto d_gate_weights = d_gates.flatten(1, 2);
  auto d_X = d_gate_weights.mm(weights);
  return {d_X.slice(/*dim=*/1, 0, state_size), d_X.slice(/*dim=*/1, state_size),
          d_gate_weights.t().mm(X), d_gate_weights.sum(/*dim=*/0, /*keepdim=*/true), d_old_cell};
}
