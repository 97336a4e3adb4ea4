// The operator's entry points for Rust. They compute whole sequences, by the way that Rust has
// chosen. One call does all steps, so that a step with kernels of its own costs the host no more
// than two launches.

#include "lltm.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <utility>

#include "../lltm_cell/lltm_cell.h"
#include "../recurrent/cpu/params.h"
#include "../recurrent/libtorch.h"
#include "../recurrent/product.h"
#include "../recurrent/step/params.h"
#include "resident.h"
#include "tch_extension/c_abi.h"
#include "tch_extension/scalar_math.h"

#ifdef TCH_EXTENSION_CUDA
#include "tch_extension/launch.h"
#endif

using namespace tch_extension;
using namespace tch_extension::recurrent;

namespace {

int32_t kind_of(const at::Tensor& tensor) { return static_cast<int32_t>(tensor.scalar_type()); }

// Computes the product of each step.
struct StepProduct {
  explicit StepProduct(const at::Tensor& result) {
    // For so few rows, cuBLAS has float kernels that take ten times as long as those of cuBLASLt,
    // which libtorch calls if the bias is a vector. On an H200 at B = 16, H = 128 they take 32 µs
    // compared with 2.7 forward, and 51 compared with 5 backward.
    constexpr int64_t kFewRows = 32;
    if (result.is_cuda() && result.scalar_type() == at::kFloat && result.size(0) <= kFewRows) {
      no_bias = at::zeros({result.size(1)}, result.options());
    }
  }

  // result = a b. Sums are not rounded to a half kind before they are written to a wider result.
  void into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b) const {
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

// W_h, [3H, H]. It is copied to contiguous memory if enough products use it to pay for the copy,
// because rows of W may begin anywhere.
at::Tensor hidden_weight(const at::Tensor& weight, int64_t hidden, int64_t steps) {
  constexpr int64_t kEnough = 4;
  const at::Tensor part = weight.narrow(1, 0, hidden);
  return steps < kEnough ? part : part.contiguous();
}

[[maybe_unused]] void check(const char* kernel, const char* error) {
  TORCH_CHECK(error == nullptr, "kernel ", kernel, ": ", error);
}

void launch(const step::ForwardParams& step, [[maybe_unused]] void* stream, bool cuda) {
#ifdef TCH_EXTENSION_CUDA
  if (cuda) {
    const auto status =
        tch_extension_lltm_step_forward_cuda(&step, static_cast<cudaStream_t>(stream));
    return check(status.kernel, status.error);
  }
#endif
  TORCH_CHECK(!cuda, "this build has no CUDA kernels");
  tch_extension_lltm_step_forward_cpu(&step);
}

#ifdef TCH_EXTENSION_CUDA
void launch(const LltmCellFusedForward& step, void* stream) {
  const auto status =
      tch_extension_lltm_cell_fused_forward_cuda(&step, static_cast<cudaStream_t>(stream));
  check(status.kernel, status.error);
}

void launch(const LltmCellFusedBackward& step, void* stream) {
  const auto status =
      tch_extension_lltm_cell_fused_backward_cuda(&step, static_cast<cudaStream_t>(stream));
  check(status.kernel, status.error);
}

void launch_tensor_cores(const LltmCellFusedForward& step, void* stream) {
  bool is_started = false;
  const auto status = tch_extension_lltm_cell_hopper_forward_cuda(
      &step, &is_started, static_cast<cudaStream_t>(stream));
  check(status.kernel, status.error);
  TORCH_CHECK(is_started, "internal error: ", status.kernel, " cannot compute this step");
}
#else
void launch_tensor_cores(const LltmCellFusedForward&, void*) {
  TORCH_CHECK(false, "this build has no CUDA kernels");
}

template <typename Step>
void launch(const Step&, void*) {
  TORCH_CHECK(false, "this build has no CUDA kernels");
}
#endif

void launch(const step::BackwardParams& step, [[maybe_unused]] void* stream, bool cuda) {
#ifdef TCH_EXTENSION_CUDA
  if (cuda) {
    const auto status =
        tch_extension_lltm_step_backward_cuda(&step, static_cast<cudaStream_t>(stream));
    return check(status.kernel, status.error);
  }
#endif
  TORCH_CHECK(!cuda, "this build has no CUDA kernels");
  tch_extension_lltm_step_backward_cpu(&step);
}

// The address of step `t` of a tensor, or null if there is no tensor.
void* at_step(const at::Tensor* tensor, int64_t t) {
  if (tensor == nullptr) return nullptr;
  return static_cast<char*>(tensor->data_ptr()) + t * tensor->stride(0) * tensor->element_size();
}

void forward_per_step(const LltmForward& call) {
  const int64_t steps = call.output->size(0), batch = call.output->size(1),
                hidden = call.output->size(2);
  const at::Tensor weight = hidden_weight(*call.weight, hidden, steps).t();
  at::Tensor hidden_gates = at::empty({batch, 3 * hidden}, call.gates->options());
  const StepProduct product(hidden_gates);
  const bool casts = call.output->scalar_type() != call.h0->scalar_type();
  at::Tensor operand = casts ? at::empty_like(*call.h0) : *call.h0;
  const int64_t c_steps = call.c->size(0);
  step::ForwardParams step{};
  step.batch = batch;
  step.hidden = hidden;
  step.kind = kind_of(*call.output);
  step.product_kind = kind_of(*call.h0);
  step.hidden_gates = hidden_gates.data_ptr();
  step.bias = call.bias == nullptr ? nullptr : call.bias->data_ptr();
  step.operand = casts ? operand.data_ptr() : nullptr;
  step.c = call.c0->data_ptr();
  for (int64_t t = 0; t < steps; ++t) {
    product.into(hidden_gates, t == 0 ? *call.h0 : operand, weight);
    step.input_gates = at_step(call.gates, t);
    step.new_h = at_step(call.output, t);
    step.new_c = at_step(call.c, c_steps == 1 ? 0 : t);
    step.activations = at_step(call.activations, t);
    launch(step, call.stream, call.output->is_cuda());
    step.c = step.new_c;
    if (!casts) operand = call.output->select(0, t);
  }
}

void backward_per_step(const LltmBackward& call) {
  const int64_t steps = call.c->size(0), batch = call.c->size(1), hidden = call.c->size(2);
  const at::Tensor weight = hidden_weight(*call.weight, hidden, steps);
  const StepProduct product(*call.grad_h);
  step::BackwardParams step{};
  step.batch = batch;
  step.hidden = hidden;
  step.kind = kind_of(*call.c);
  step.product_kind = kind_of(*call.weight);
  step.grad_h = call.grad_h->data_ptr();
  step.grad_c = call.grad_c->data_ptr();
  for (int64_t t = steps - 1; t >= 0; --t) {
    step.grad_output = at_step(call.grad_output, t);
    step.activations = at_step(call.activations, t);
    step.new_c = at_step(call.c, t);
    step.grad_gates = at_step(call.grad_gates, t);
    launch(step, call.stream, call.c->is_cuda());
    if (t > 0 || call.needs_grad_h0)
      product.into(*call.grad_h, call.grad_gates->select(0, t), weight);
  }
}

// Whether rows of this tensor may be read 16 bytes at a time.
bool allows_vectors(const at::Tensor& tensor, int64_t columns, int64_t stride) {
  const auto lanes = static_cast<int64_t>(16 / tensor.element_size());
  return columns % lanes == 0 && stride % lanes == 0 &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

// The parameters that the cell's kernels get in every step. Unless the input is multiplied at once,
// these kernels multiply it, too.
LltmCellFusedForward cell_of(const LltmForward& call) {
  const int64_t hidden = call.output->size(2);
  LltmCellFusedForward step{};
  step.batch = call.output->size(1);
  step.features = call.input_at_once ? 0 : call.input->size(2);
  step.hidden = hidden;
  step.kind = kind_of(*call.output);
  step.vectors = allows_vectors(*call.weight, hidden, call.weight->stride(0)) &&
                 allows_vectors(*call.h0, hidden, hidden) &&
                 allows_vectors(*call.output, hidden, hidden) &&
                 allows_vectors(*call.input, step.features, step.features);
  step.input_stride = step.features;
  step.weight = call.weight->const_data_ptr();
  step.weight_stride = call.weight->stride(0);
  step.bias = call.bias == nullptr ? nullptr : call.bias->const_data_ptr();
  step.h = call.h0->const_data_ptr();
  step.h_stride = step.c_stride = hidden;
  step.c = call.c0->const_data_ptr();
  return step;
}

template <typename Launch>
void for_each_cell(const LltmForward& call, Launch&& launch) {
  const int64_t steps = call.output->size(0), c_steps = call.c->size(0);
  LltmCellFusedForward step = cell_of(call);
  for (int64_t t = 0; t < steps; ++t) {
    step.input = at_step(call.input, t);
    step.input_gates = at_step(call.input_at_once ? call.gates : nullptr, t);
    step.new_h = at_step(call.output, t);
    step.new_c = at_step(call.c, c_steps == 1 ? 0 : t);
    step.activations = at_step(call.activations, t);
    launch(step);
    step.h = step.new_h;
    step.c = step.new_c;
  }
}

void forward_fused(const LltmForward& call) {
  for_each_cell(call, [&](const LltmCellFusedForward& step) { launch(step, call.stream); });
}

// The tensor, or a copy of it if it begins where bulk copies cannot read.
at::Tensor reachable(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : tensor.clone();
}

void forward_by_tensor_cores(LltmForward call) {
  const at::Tensor input = reachable(*call.input), weight = reachable(*call.weight);
  const at::Tensor h0 = reachable(*call.h0), c0 = reachable(*call.c0);
  call.input = &input;
  call.weight = &weight;
  call.h0 = &h0;
  call.c0 = &c0;
  for_each_cell(call,
                [&](const LltmCellFusedForward& step) { launch_tensor_cores(step, call.stream); });
}

// Computes the gradients for the gates of each step, and with them the gradients that the preceding
// step gets.
void backward_fused(const LltmBackward& call) {
  const int64_t steps = call.c->size(0);
  LltmCellFusedBackward step{};
  step.batch = call.c->size(1);
  step.hidden = call.c->size(2);
  step.kind = kind_of(*call.c);
  step.wide = true;
  step.weight = call.weight->const_data_ptr();
  step.weight_stride = call.weight->stride(0);
  // Blocks read gradients that other blocks would overwrite, so there are two buffers for each.
  at::Tensor other_h = at::empty_like(*call.grad_h), other_c = at::empty_like(*call.grad_c);
  for (int64_t t = steps - 1; t >= 0; --t) {
    step.grad_new_h = at_step(call.grad_output, t);
    step.grad_recurrent = call.grad_h->const_data_ptr();
    step.grad_new_c = call.grad_c->const_data_ptr();
    step.activations = at_step(call.activations, t);
    step.new_c = at_step(call.c, t);
    step.grad_h = other_h.mutable_data_ptr();
    step.grad_c = other_c.mutable_data_ptr();
    step.grad_gates = at_step(call.grad_gates, t);
    launch(step, call.stream);
    std::swap(*call.grad_h, other_h);
    std::swap(*call.grad_c, other_c);
  }
}

// The scratch memory of a team of threads, and the team's sizes.
struct TeamMemory {
  at::Tensor packed;
  at::Tensor counters;
  cpu::Team team;
};

TeamMemory team_memory(const at::Tensor& like, int64_t hidden, int32_t row_groups,
                       int32_t column_groups) {
  constexpr int64_t kWidestPanel = 32;
  const int64_t columns = round_up(hidden, kWidestPanel);
  TeamMemory memory;
  memory.packed = at::empty({3 * hidden, columns}, like.options());
  const int64_t counters = 1 + row_groups + int64_t{row_groups} * column_groups;
  memory.counters = at::zeros({counters, 8}, like.options().dtype(at::kLong));
  memory.team = {row_groups, column_groups, memory.counters.mutable_data_ptr<int64_t>()};
  return memory;
}

void forward_packed(const LltmForward& call) {
  const int64_t steps = call.output->size(0), batch = call.output->size(1),
                hidden = call.output->size(2);
  const TeamMemory memory = team_memory(*call.weight, hidden, call.row_groups, call.column_groups);
  cpu::ForwardParams params{};
  params.steps = steps;
  params.batch = batch;
  params.hidden = hidden;
  params.weight_stride = call.weight->stride(0);
  params.c_stride = call.c->size(0) == steps ? batch * hidden : 0;
  params.gates_stride = batch * 3 * hidden;
  params.kind = kind_of(*call.output);
  params.team = memory.team;
  params.weight = call.weight->data_ptr();
  params.input_gates = call.gates->data_ptr();
  params.h0 = call.h0->data_ptr();
  params.c0 = call.c0->data_ptr();
  params.output = call.output->data_ptr();
  params.c = call.c->data_ptr();
  params.activations = at_step(call.activations, 0);
  params.packed = memory.packed.data_ptr();
  tch_extension_lltm_packed_forward_cpu(&params);
}

void backward_packed(const LltmBackward& call) {
  const int64_t hidden = call.c->size(2);
  const TeamMemory memory = team_memory(*call.weight, hidden, call.row_groups, call.column_groups);
  cpu::BackwardParams params{};
  params.steps = call.c->size(0);
  params.batch = call.c->size(1);
  params.hidden = hidden;
  params.weight_stride = call.weight->stride(0);
  params.kind = kind_of(*call.c);
  params.needs_grad_h0 = call.needs_grad_h0;
  params.team = memory.team;
  params.weight = call.weight->data_ptr();
  params.grad_output = at_step(call.grad_output, 0);
  params.activations = call.activations->data_ptr();
  params.c = call.c->data_ptr();
  params.grad_h = call.grad_h->data_ptr();
  params.grad_c = call.grad_c->data_ptr();
  params.grad_gates = call.grad_gates->data_ptr();
  params.packed = memory.packed.data_ptr();
  tch_extension_lltm_packed_backward_cpu(&params);
}

// Computes the input's part of all gates. On the CPU this part includes the bias.
void multiply_input(const LltmForward& call) {
  const int64_t hidden = call.output->size(2), features = call.input->size(2);
  const int64_t rows = call.output->size(0) * call.output->size(1);
  const at::Tensor input = call.input->view({rows, features});
  const at::Tensor weight = call.weight->narrow(1, hidden, features).t();
  at::Tensor gates = call.gates->view({rows, 3 * hidden});
  if (call.way != LltmWay::Cpu) return StepProduct(gates).into(gates, input, weight);
  // The product allocates its own memory, which replaces the old gates for both tensors that share
  // them.
  gates = product(input, weight, call.bias).view(call.gates->sizes());
  if (call.activations != nullptr && call.activations->is_same(*call.gates))
    *call.activations = gates;
  *call.gates = std::move(gates);
}

}  // namespace

// Neither function is called for a sequence without steps, rows or columns.
TCH_EXTENSION_API Message tch_extension_lltm_forward(const LltmForward* call) {
  return guard([&] {
    const PlainDispatch plain;
    if (call->input_at_once) multiply_input(*call);
    switch (call->way) {
      case LltmWay::Cpu:
        return forward_packed(*call);
      case LltmWay::Fused:
        return forward_fused(*call);
      case LltmWay::Cluster:
        return run_clusters(*call);
      case LltmWay::Grid:
      case LltmWay::WideGrid:
      case LltmWay::PlainGrid:
        if (run_grid(*call)) return;
        return forward_per_step(*call);
      case LltmWay::TensorCores:
        return forward_by_tensor_cores(*call);
      default:
        return forward_per_step(*call);
    }
  });
}

TCH_EXTENSION_API Message tch_extension_lltm_backward(const LltmBackward* call) {
  return guard([&] {
    const PlainDispatch plain;
    switch (call->way) {
      case LltmWay::Cpu:
        return backward_packed(*call);
      case LltmWay::Cluster:
        return run_clusters(*call);
      case LltmWay::Grid:
      case LltmWay::WideGrid:
      case LltmWay::PlainGrid:
        if (run_grid(*call)) return;
        return backward_per_step(*call);
      case LltmWay::Fused:
        return backward_fused(*call);
      default:
        return backward_per_step(*call);
    }
  });
}
