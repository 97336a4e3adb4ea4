// Whole sequences with a product and a kernel for each step. The loop is here, because a product by
// tch takes the host longer than the GPU needs for a small step.

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "libtorch.h"
#include "params.h"
#include "product.h"
#include "step/params.h"
#include "tch_extension/c_abi.h"

#ifdef TCH_EXTENSION_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "tch_extension/launch.h"
#endif

namespace tch_extension::recurrent {
namespace {

// Computes the product of each step.
struct StepProduct {
  // In one or two steps, the zeros cost more than they save at most sizes.
  StepProduct(const at::Tensor& result, int64_t steps) {
    constexpr int64_t kFewSteps = 2;
    if (steps > kFewSteps) no_bias = zeros_for(result, result.size(1), result.size(0));
  }

  // result = a b. Sums are not rounded to a half kind before they are written to a wider result.
  void into(at::Tensor result, const at::Tensor& a, const at::Tensor& b) const {
    if (result.scalar_type() != a.scalar_type()) {
      at::mm_outf(a, b, result.scalar_type(), result);
    } else if (no_bias.defined()) {
      at::addmm_out(result, no_bias, a, b);
    } else {
      at::mm_out(result, a, b);
    }
  }

  at::Tensor no_bias;
};

// W_h, [G·H, H]. If its rows are apart, it is copied to contiguous memory if enough products use it
// to pay for the copy.
at::Tensor hidden_weight(const at::Tensor& weight, int64_t steps) {
  constexpr int64_t kEnough = 4;
  return steps < kEnough ? weight : weight.contiguous();
}

// A cell's kernel for one step.
template <typename Params>
class Kernel {
 public:
  Kernel(const void* on_cpu, const void* on_cuda, const at::Tensor& on)
      : on_cpu_(reinterpret_cast<void (*)(const Params*) noexcept>(on_cpu)) {
#ifdef TCH_EXTENSION_CUDA
    if (on_cuda == nullptr) return;
    on_cuda_ = reinterpret_cast<LaunchStatus (*)(const Params*, cudaStream_t)>(on_cuda);
    guard_.emplace(on.device());
    stream_ = c10::cuda::getCurrentCUDAStream(on.device().index());
#else
    TORCH_CHECK(on_cuda == nullptr && on.is_cpu(), "this build has no CUDA kernels");
#endif
  }

  void start(const Params& params) const {
    if (on_cpu_ != nullptr) return on_cpu_(&params);
#ifdef TCH_EXTENSION_CUDA
    const LaunchStatus status = on_cuda_(&params, stream_);
    TORCH_CHECK(status.error == nullptr, "kernel ", status.kernel, ": ", status.error);
#endif
  }

 private:
  void (*on_cpu_)(const Params*) noexcept;
#ifdef TCH_EXTENSION_CUDA
  LaunchStatus (*on_cuda_)(const Params*, cudaStream_t) = nullptr;
  std::optional<c10::cuda::CUDAGuard> guard_;
  cudaStream_t stream_ = nullptr;
#endif
};

// The address of step `t` of a tensor, or null if there is no tensor.
void* at_step(const at::Tensor* tensor, int64_t t) {
  if (tensor == nullptr) return nullptr;
  return static_cast<char*>(tensor->data_ptr()) + t * tensor->stride(0) * tensor->element_size();
}

void* after(void* address, int64_t bytes) { return static_cast<char*>(address) + bytes; }

void run(const RecurrentStepsForward& call) {
  const PlainDispatch plain;
  const at::Tensor weight = hidden_weight(*call.weight, call.steps).t();
  const StepProduct product(*call.hidden_gates, call.steps);
  const Kernel<step::ForwardParams> kernel(call.on_cpu, call.on_cuda, *call.output);
  const int64_t state_bytes =
      call.keeps_c != 0 ? call.output->stride(0) * call.output->element_size() : 0;
  step::ForwardParams step = call.first;
  at::Tensor h = *call.h0;
  for (int64_t t = 0; t < call.steps; ++t) {
    product.into(*call.hidden_gates, h, weight);
    step.input_gates = at_step(call.input_gates, t);
    step.new_h = at_step(call.output, t);
    step.activations = at_step(call.activations, t);
    if (call.last_h != nullptr && t + 1 == call.steps) step.operand = call.last_h;
    kernel.start(step);
    step.c = call.state_is_h != 0 ? step.new_h : step.new_c;
    if (call.state_is_h == 0) step.new_c = after(step.new_c, state_bytes);
    h = call.operand != nullptr ? *call.operand : call.output->select(0, t);
  }
}

void run(const RecurrentStepsBackward& call) {
  const PlainDispatch plain;
  const at::Tensor weight = hidden_weight(*call.weight, call.steps);
  const StepProduct product(*call.grad_h, call.steps);
  const Kernel<step::BackwardParams> kernel(call.on_cpu, call.on_cuda, *call.states);
  step::BackwardParams step = call.last;
  for (int64_t t = call.steps - 1; t >= 0; --t) {
    step.grad_output = at_step(call.grad_output, t);
    step.activations = at_step(call.activations, t);
    step.new_c = call.state_is_h != 0 ? nullptr : at_step(call.states, t);
    step.previous_c = t == 0 ? call.last.previous_c : at_step(call.states, t - 1);
    step.grad_gates = at_step(call.grad_gates, t);
    step.grad_separate = at_step(call.grad_separate, t);
    kernel.start(step);
    if (t > 0 || call.needs_grad_h0 != 0)
      product.into(*call.grad_h, call.grad_gates->select(0, t), weight);
  }
}

}  // namespace
}  // namespace tch_extension::recurrent

// Neither function is called for a sequence without steps, rows or columns.
TCH_EXTENSION_API tch_extension::Message tch_extension_recurrent_steps_forward(
    const RecurrentStepsForward* call) {
  return tch_extension::guard([&] { tch_extension::recurrent::run(*call); });
}

TCH_EXTENSION_API tch_extension::Message tch_extension_recurrent_steps_backward(
    const RecurrentStepsBackward* call) {
  return tch_extension::guard([&] { tch_extension::recurrent::run(*call); });
}
