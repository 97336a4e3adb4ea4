// Turns tensors into the parameters of the kernels that keep W_h on the chip.

#include "resident.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "tch_extension/scalar_math.h"

#ifdef TCH_EXTENSION_CUDA
#include "../recurrent/cluster/params.h"
#include "../recurrent/grid/params.h"
#include "tch_extension/launch.h"
#endif

namespace tch_extension {

#ifdef TCH_EXTENSION_CUDA

namespace {

int32_t kind_of(const at::Tensor& tensor) { return static_cast<int32_t>(tensor.scalar_type()); }

void* address(const at::Tensor* tensor) { return tensor == nullptr ? nullptr : tensor->data_ptr(); }

void check(const LaunchStatus& status) {
  TORCH_CHECK(status.error == nullptr, "kernel ", status.kernel, ": ", status.error);
}

// The tensor, or a copy of it if it is misaligned: the kernels read it 16 bytes at a time.
at::Tensor aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0 ? tensor : tensor.clone();
}

// A matrix of fp16 values and its scales (recurrent/scale_rows.h).
struct ScaledMatrix {
  ScaledMatrix() = default;
  ScaledMatrix(const at::Tensor& from, int64_t stride, int64_t exponent_of_zeros)
      : values(at::empty({from.size(0), stride}, from.options().dtype(at::kHalf))),
        scales(at::empty({from.size(0)}, from.options())),
        rows{from.size(0),
             from.stride(0),
             stride,
             from.const_data_ptr<float>(),
             values.data_ptr(),
             scales.mutable_data_ptr<float>(),
             exponent_of_zeros} {}

  at::Tensor values, scales;
  recurrent::ScaledRows rows = {};
};

// The operands of a kernel, W_h and h0. Where libtorch allows tf32, they are fp16 values with
// scales.
struct Operands {
  // Without h0 there is only W_h.
  Operands(const at::Tensor& whole_weight, const at::Tensor* first_h, int64_t hidden,
           bool are_scaled, void* stream)
      : weight(whole_weight), h0(first_h == nullptr ? at::Tensor() : *first_h) {
    if (!are_scaled) return;
    // Rows are padded to a multiple of this many values, so that they may be read 16 bytes at a
    // time.
    constexpr int64_t kOf16Bytes = 8;
    scaled_weight = ScaledMatrix(weight, round_up(hidden, kOf16Bytes), recurrent::kMostExponent);
    if (first_h != nullptr) scaled_h0 = ScaledMatrix(h0, hidden, 0);
    const recurrent::ScaleRows params{hidden, {scaled_weight.rows, scaled_h0.rows}};
    check(tch_extension_recurrent_scale_rows_cuda(&params, static_cast<cudaStream_t>(stream)));
    weight = scaled_weight.values;
    h0 = scaled_h0.values;
  }

  const float* scales() const { return scaled_weight.rows.scales; }
  const float* h0_scales() const { return scaled_h0.rows.scales; }

  at::Tensor weight, h0;
  ScaledMatrix scaled_weight, scaled_h0;
};

}  // namespace

void run_clusters(const LltmForward& call) {
  const int64_t hidden = call.output->size(2);
  const Operands operands(*call.weight, call.h0, hidden, call.is_scaled != 0, call.stream);
  recurrent::cluster::ForwardParams params{};
  params.steps = call.output->size(0);
  params.batch = call.output->size(1);
  params.hidden = hidden;
  params.weight_stride = operands.weight.stride(0);
  params.c_stride = call.c->size(0) == params.steps ? params.batch * params.hidden : 0;
  params.kind = kind_of(*call.output);
  params.product_kind = kind_of(operands.h0);
  params.cluster = call.column_groups;
  params.weight = operands.weight.const_data_ptr();
  params.scales = operands.scales();
  params.input_gates = address(call.gates);
  params.bias = address(call.bias);
  params.h0 = operands.h0.const_data_ptr();
  params.h0_scales = operands.h0_scales();
  params.c0 = address(call.c0);
  params.output = address(call.output);
  params.c = address(call.c);
  params.activations = address(call.activations);
  check(tch_extension_lltm_cluster_forward_cuda(&params, static_cast<cudaStream_t>(call.stream)));
}

void run_clusters(const LltmBackward& call) {
  const int64_t hidden = call.c->size(2);
  const Operands operands(*call.weight, nullptr, hidden, call.is_scaled != 0, call.stream);
  recurrent::cluster::BackwardParams params{};
  params.steps = call.c->size(0);
  params.batch = call.c->size(1);
  params.hidden = hidden;
  params.weight_stride = operands.weight.stride(0);
  params.kind = kind_of(*call.c);
  params.product_kind = kind_of(operands.weight);
  params.cluster = call.column_groups;
  params.needs_grad_h0 = call.needs_grad_h0;
  params.weight = operands.weight.const_data_ptr();
  params.scales = operands.scales();
  params.grad_output = address(call.grad_output);
  params.activations = address(call.activations);
  params.c = address(call.c);
  params.grad_h = address(call.grad_h);
  params.grad_c = address(call.grad_c);
  params.grad_gates = address(call.grad_gates);
  check(tch_extension_lltm_cluster_backward_cuda(&params, static_cast<cudaStream_t>(call.stream)));
}

namespace {

// The memory of the backward pass's scaled messages; empty without scales.
struct ScaledMessages {
  ScaledMessages(const recurrent::grid::BackwardParams& params, const at::TensorOptions& like) {
    if (params.scales == nullptr) return;
    const int64_t rows = params.steps * round_up(params.batch, recurrent::grid::kExchangeRows);
    const int64_t halves = rows * 3 * round_up(params.hidden, recurrent::grid::kExchangeColumns);
    const int64_t of_row =
        round_up(params.hidden, recurrent::grid::kScaledColumns) / recurrent::grid::kColumnsOfScale;
    memory = at::empty({halves / 2 + rows * of_row}, like.dtype(at::kFloat));
    values = memory.data_ptr();
    scales = memory.mutable_data_ptr<float>() + halves / 2;
  }

  at::Tensor memory;
  void* values = nullptr;
  float* scales = nullptr;
};

using RunForward = LaunchStatus(const recurrent::grid::ForwardParams*, bool* fits, cudaStream_t);

RunForward* forward_of(LltmWay way) {
  if (way == LltmWay::WideGrid) return tch_extension_lltm_grid_wide_forward_cuda;
  if (way == LltmWay::PlainGrid) return tch_extension_lltm_grid_plain_forward_cuda;
  return tch_extension_lltm_grid_forward_cuda;
}

using RunBackward = LaunchStatus(const recurrent::grid::BackwardParams*, bool* fits, cudaStream_t);

RunBackward* backward_of(LltmWay way) {
  if (way == LltmWay::WideGrid) return tch_extension_lltm_grid_wide_backward_cuda;
  if (way == LltmWay::PlainGrid) return tch_extension_lltm_grid_plain_backward_cuda;
  return tch_extension_lltm_grid_backward_cuda;
}

}  // namespace

bool run_grid(const LltmForward& call) {
  const Operands operands(*call.weight, call.h0, call.output->size(2), call.is_scaled != 0,
                          call.stream);
  const at::Tensor h0 = aligned(operands.h0);
  const bool casts = h0.scalar_type() != call.output->scalar_type();
  const at::Tensor exchange = casts ? at::empty(call.output->sizes(), h0.options()) : *call.output;
  recurrent::grid::ForwardParams params{};
  params.steps = call.output->size(0);
  params.batch = call.output->size(1);
  params.hidden = call.output->size(2);
  params.weight_stride = operands.weight.stride(0);
  params.c_stride = call.c->size(0) == params.steps ? params.batch * params.hidden : 0;
  params.kind = kind_of(*call.output);
  params.product_kind = kind_of(h0);
  params.columns = call.column_groups;
  params.row_groups = call.row_groups;
  params.weight = operands.weight.const_data_ptr();
  params.scales = operands.scales();
  params.h0_scales = operands.h0_scales();
  params.input_gates = address(call.gates);
  params.bias = address(call.bias);
  params.h0 = h0.const_data_ptr();
  params.c0 = address(call.c0);
  params.output = address(call.output);
  params.exchange = exchange.mutable_data_ptr();
  params.c = address(call.c);
  params.activations = address(call.activations);
  bool fits = false;
  check(forward_of(call.way)(&params, &fits, static_cast<cudaStream_t>(call.stream)));
  return fits;
}

bool run_grid(const LltmBackward& call) {
  const at::Tensor grad_output =
      call.grad_output == nullptr ? at::Tensor() : aligned(*call.grad_output);
  const at::Tensor activations = aligned(*call.activations), c = aligned(*call.c);
  const Operands operands(*call.weight, nullptr, c.size(2), call.is_scaled != 0, call.stream);
  recurrent::grid::BackwardParams params{};
  params.steps = c.size(0);
  params.batch = c.size(1);
  params.hidden = c.size(2);
  params.weight_stride = operands.weight.stride(0);
  params.kind = kind_of(c);
  params.product_kind = kind_of(operands.weight);
  params.columns = call.column_groups;
  params.row_groups = call.row_groups;
  params.needs_grad_h0 = call.needs_grad_h0;
  params.weight = operands.weight.const_data_ptr();
  params.scales = operands.scales();
  const ScaledMessages messages(params, c.options());
  params.exchange = messages.values;
  params.exchange_scales = messages.scales;
  params.grad_output = grad_output.defined() ? grad_output.const_data_ptr() : nullptr;
  params.activations = activations.const_data_ptr();
  params.c = c.const_data_ptr();
  params.grad_h = address(call.grad_h);
  params.grad_c = address(call.grad_c);
  params.grad_gates = address(call.grad_gates);
  bool fits = false;
  check(backward_of(call.way)(&params, &fits, static_cast<cudaStream_t>(call.stream)));
  return fits;
}

#else

void run_clusters(const LltmForward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }
void run_clusters(const LltmBackward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }
bool run_grid(const LltmForward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }
bool run_grid(const LltmBackward&) { TORCH_CHECK(false, "this build has no CUDA kernels"); }

#endif

}  // namespace tch_extension
