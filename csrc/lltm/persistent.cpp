// From tensors to what the persistent kernels take.

#include <ATen/ATen.h>

#include "persistent_call.h"

#ifdef TCH_EXTENSION_CUDA
#include "grid.h"
#include "persistent.h"
#include "tch_extension/launch.h"

extern "C" tch_extension::LaunchStatus tch_extension_lltm_persistent_forward_cuda(
    const LltmPersistentForward*, cudaStream_t);
extern "C" tch_extension::LaunchStatus tch_extension_lltm_persistent_backward_cuda(
    const LltmPersistentBackward*, cudaStream_t);
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_forward_cuda(const LltmGridForward*,
                                                                            bool* fits, cudaStream_t);
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_wide_forward_cuda(const LltmGridForward*,
                                                                                 bool* fits, cudaStream_t);
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_backward_cuda(const LltmGridBackward*,
                                                                             bool* fits, cudaStream_t);
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_wide_backward_cuda(const LltmGridBackward*,
                                                                                  bool* fits, cudaStream_t);
#endif

namespace tch_extension {

#ifdef TCH_EXTENSION_CUDA

namespace {

int32_t kind_of(const at::Tensor& tensor) { return static_cast<int32_t>(tensor.scalar_type()); }

void* address(const at::Tensor* tensor) { return tensor == nullptr ? nullptr : tensor->data_ptr(); }

void check(const LaunchStatus& status) {
  TORCH_CHECK(status.error == nullptr, "kernel ", status.kernel, ": ", status.error);
}

// The kernels read it 16 bytes at a time.
at::Tensor aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : tensor.clone();
}

}  // namespace

void lltm_persistent(const LltmForward& call) {
  LltmPersistentForward params{};
  params.steps = call.output->size(0);
  params.batch = call.output->size(1);
  params.hidden = call.output->size(2);
  params.weight_stride = call.weight->stride(0);
  params.c_stride = call.c->size(0) == params.steps ? params.batch * params.hidden : 0;
  params.kind = kind_of(*call.output);
  params.product_kind = kind_of(*call.h0);
  params.cluster = call.column_groups;
  params.groups = call.row_groups;
  params.tf32 = call.path == kLltmPersistentTf32;
  params.weight = address(call.weight);
  params.input_gates = address(call.gates);
  params.bias = address(call.bias);
  params.h0 = address(call.h0);
  params.c0 = address(call.c0);
  params.output = address(call.output);
  params.c = address(call.c);
  params.activations = address(call.activations);
  check(tch_extension_lltm_persistent_forward_cuda(&params, static_cast<cudaStream_t>(call.stream)));
}

void lltm_persistent(const LltmBackward& call) {
  LltmPersistentBackward params{};
  params.steps = call.c->size(0);
  params.batch = call.c->size(1);
  params.hidden = call.c->size(2);
  params.weight_stride = call.weight->stride(0);
  params.kind = kind_of(*call.c);
  params.product_kind = kind_of(*call.weight);
  params.cluster = call.column_groups;
  params.tf32 = call.path == kLltmPersistentTf32;
  params.needs_grad_h0 = call.needs_grad_h0;
  params.weight = address(call.weight);
  params.grad_output = address(call.grad_output);
  params.activations = address(call.activations);
  params.c = address(call.c);
  params.grad_h = address(call.grad_h);
  params.grad_c = address(call.grad_c);
  params.grad_gates = address(call.grad_gates);
  check(tch_extension_lltm_persistent_backward_cuda(&params, static_cast<cudaStream_t>(call.stream)));
}

bool lltm_grid(const LltmForward& call) {
  const at::Tensor h0 = aligned(*call.h0);
  const bool casts = h0.scalar_type() != call.output->scalar_type();
  const at::Tensor exchange = casts ? at::empty(call.output->sizes(), h0.options()) : *call.output;
  LltmGridForward params{};
  params.steps = call.output->size(0);
  params.batch = call.output->size(1);
  params.hidden = call.output->size(2);
  params.weight_stride = call.weight->stride(0);
  params.c_stride = call.c->size(0) == params.steps ? params.batch * params.hidden : 0;
  params.kind = kind_of(*call.output);
  params.product_kind = kind_of(h0);
  params.columns = call.column_groups;
  params.row_groups = call.row_groups;
  params.weight = address(call.weight);
  params.input_gates = address(call.gates);
  params.bias = address(call.bias);
  params.h0 = h0.const_data_ptr();
  params.c0 = address(call.c0);
  params.output = address(call.output);
  params.exchange = exchange.mutable_data_ptr();
  params.c = address(call.c);
  params.activations = address(call.activations);
  const bool is_wide = call.path == kLltmWideGrid;
  const auto run = is_wide ? tch_extension_lltm_grid_wide_forward_cuda : tch_extension_lltm_grid_forward_cuda;
  bool fits = false;
  check(run(&params, &fits, static_cast<cudaStream_t>(call.stream)));
  return fits;
}

bool lltm_grid(const LltmBackward& call) {
  const at::Tensor grad_output = call.grad_output == nullptr ? at::Tensor() : aligned(*call.grad_output);
  const at::Tensor activations = aligned(*call.activations), c = aligned(*call.c);
  LltmGridBackward params{};
  params.steps = c.size(0);
  params.batch = c.size(1);
  params.hidden = c.size(2);
  params.weight_stride = call.weight->stride(0);
  params.kind = kind_of(c);
  params.product_kind = kind_of(*call.weight);
  params.columns = call.column_groups;
  params.row_groups = call.row_groups;
  params.needs_grad_h0 = call.needs_grad_h0;
  params.weight = address(call.weight);
  params.grad_output = grad_output.defined() ? grad_output.const_data_ptr() : nullptr;
  params.activations = activations.const_data_ptr();
  params.c = c.const_data_ptr();
  params.grad_h = address(call.grad_h);
  params.grad_c = address(call.grad_c);
  params.grad_gates = address(call.grad_gates);
  const bool is_wide = call.path == kLltmWideGrid;
  const auto run =
      is_wide ? tch_extension_lltm_grid_wide_backward_cuda : tch_extension_lltm_grid_backward_cuda;
  bool fits = false;
  check(run(&params, &fits, static_cast<cudaStream_t>(call.stream)));
  return fits;
}

#else

void lltm_persistent(const LltmForward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }
void lltm_persistent(const LltmBackward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }
bool lltm_grid(const LltmForward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }
bool lltm_grid(const LltmBackward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }

#endif

}  // namespace tch_extension
