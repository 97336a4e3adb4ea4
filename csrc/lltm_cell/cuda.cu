// Each thread computes kLanes adjacent columns of one row. The kernels are memory-bound: for each
// element of [B, H] the forward reads 4 values and writes 2 (4 with activations), and the backward
// reads 6 and writes 4. Adjacent threads access adjacent addresses, up to 16 bytes each where sizes
// and addresses allow.

#include "functions.h"
#include "lltm_cell.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension {
namespace {

template <typename T, int kLanes>
__device__ __forceinline__ Values<T, kLanes> load_or_zero(const void* pointer, int64_t at) {
  return pointer == nullptr ? Values<T, kLanes>{} : load_values<T, kLanes>(pointer, at);
}

// How many values a thread has at a time. For the half kinds they are 8 bytes: with 16, only half
// as many threads would have loads in flight.
template <typename T>
constexpr int kLanesOfThread = sizeof(T) == 2 ? 4 : kLanesOf16Bytes<T>;

template <typename T, int kLanes>
__device__ __forceinline__ void add(Values<T, kLanes>& sum, const Values<T, kLanes>& term) {
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) sum.lane[lane] += term.lane[lane];
}

// Index is 32 bits wide where the sizes allow it, because a 64-bit division costs more than the
// arithmetic.
template <typename T, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads)
    lltm_cell_forward_kernel(LltmCellForward params, const void* bias) {
  using F = Functions<T>;
  const Index vectors_per_row = static_cast<Index>(params.hidden / kLanes);
  const Index vectors = static_cast<Index>(params.batch) * vectors_per_row;
  const int64_t hidden = params.hidden;
  for (Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<Index>(gridDim.x) * kThreads) {
    const int64_t at = static_cast<int64_t>(index) * kLanes;
    const Index row = index / vectors_per_row;
    const int64_t at_gate = at + 2 * hidden * static_cast<int64_t>(row);
    auto i = load_values<T, kLanes>(params.gates, at_gate);
    auto o = load_values<T, kLanes>(params.gates, at_gate + hidden);
    auto g = load_values<T, kLanes>(params.gates, at_gate + 2 * hidden);
    auto c = load_values<T, kLanes>(params.c, at);
    if (bias != nullptr) {
      const int64_t column = static_cast<int64_t>(index - row * vectors_per_row) * kLanes;
      add(i, load_values<T, kLanes>(bias, column));
      add(o, load_values<T, kLanes>(bias, column + hidden));
      add(g, load_values<T, kLanes>(bias, column + 2 * hidden));
    }
    Values<T, kLanes> h;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      i.lane[lane] = F::sigmoid(i.lane[lane]);
      o.lane[lane] = F::sigmoid(o.lane[lane]);
      c.lane[lane] += F::elu(g.lane[lane]) * i.lane[lane];
      h.lane[lane] = F::tanh(c.lane[lane]) * o.lane[lane];
    }
    store_values<T>(params.new_c, at, c);
    store_values<T>(params.new_h, at, h);
    if (params.output != nullptr) store_values<T>(params.output, at, h);
    if (params.save_activations) {
      store_values<T>(params.gates, at_gate, i);
      store_values<T>(params.gates, at_gate + hidden, o);
      if (bias != nullptr) store_values<T>(params.gates, at_gate + 2 * hidden, g);
    }
  }
}

template <typename T, int kLanes, typename Index>
__global__ void __launch_bounds__(kThreads) lltm_cell_backward_kernel(LltmCellBackward params) {
  using F = Functions<T>;
  const Index vectors_per_row = static_cast<Index>(params.hidden / kLanes);
  const Index vectors = static_cast<Index>(params.batch) * vectors_per_row;
  const int64_t hidden = params.hidden;
  for (Index index = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; index < vectors;
       index += static_cast<Index>(gridDim.x) * kThreads) {
    const int64_t at = static_cast<int64_t>(index) * kLanes;
    const int64_t at_gate = at + 2 * hidden * static_cast<int64_t>(index / vectors_per_row);
    const auto i = load_values<T, kLanes>(params.activations, at_gate);
    const auto o = load_values<T, kLanes>(params.activations, at_gate + hidden);
    const auto g = load_values<T, kLanes>(params.activations, at_gate + 2 * hidden);
    const auto new_c = load_values<T, kLanes>(params.new_c, at);
    const auto grad_h = load_or_zero<T, kLanes>(params.grad_new_h, at);
    auto grad_c = load_or_zero<T, kLanes>(params.grad_new_c, at);
    Values<T, kLanes> grad_i, grad_o, grad_g;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto tanh_c = F::tanh(new_c.lane[lane]);
      grad_c.lane[lane] += grad_h.lane[lane] * o.lane[lane] * tanh_grad(tanh_c);
      grad_i.lane[lane] = grad_c.lane[lane] * F::elu(g.lane[lane]) * sigmoid_grad(i.lane[lane]);
      grad_o.lane[lane] = grad_h.lane[lane] * tanh_c * sigmoid_grad(o.lane[lane]);
      grad_g.lane[lane] = grad_c.lane[lane] * i.lane[lane] * F::elu_grad(g.lane[lane]);
    }
    store_values<T>(params.grad_gates, at_gate, grad_i);
    store_values<T>(params.grad_gates, at_gate + hidden, grad_o);
    store_values<T>(params.grad_gates, at_gate + 2 * hidden, grad_g);
    if (params.grad_c != nullptr) store_values<T>(params.grad_c, at, grad_c);
  }
}

// The loop adds the size of the grid to an index below the end; the sum must not overflow.
bool fits_32_bits(int64_t batch, int64_t hidden) { return batch * 3 * hidden < INT32_MAX / 2; }

// The forward's parameters, and a bias that is added to the gates; the bias may be null.
struct Forward {
  LltmCellForward params;
  const void* bias;  // [3H]
};

bool allows_vectors(const Forward& forward, int lanes) {
  const LltmCellForward& params = forward.params;
  return is_aligned_to_16(forward.bias) && params.hidden % lanes == 0 &&
         is_aligned_to_16(params.gates) && is_aligned_to_16(params.c) &&
         is_aligned_to_16(params.new_h) && is_aligned_to_16(params.new_c) &&
         is_aligned_to_16(params.output);
}

bool allows_vectors(const LltmCellBackward& params, int lanes) {
  // A null pointer counts as aligned.
  return params.hidden % lanes == 0 && is_aligned_to_16(params.grad_new_h) &&
         is_aligned_to_16(params.grad_new_c) && is_aligned_to_16(params.activations) &&
         is_aligned_to_16(params.new_c) && is_aligned_to_16(params.grad_gates) &&
         is_aligned_to_16(params.grad_c);
}

template <typename T, int kLanes, typename Index>
void start(const Forward& forward, cudaStream_t stream) {
  const unsigned int blocks = blocks_for(forward.params.batch * forward.params.hidden / kLanes);
  lltm_cell_forward_kernel<T, kLanes, Index>
      <<<blocks, kThreads, 0, stream>>>(forward.params, forward.bias);
}

template <typename T, int kLanes, typename Index>
void start(const LltmCellBackward& params, cudaStream_t stream) {
  const unsigned int blocks = blocks_for(params.batch * params.hidden / kLanes);
  lltm_cell_backward_kernel<T, kLanes, Index><<<blocks, kThreads, 0, stream>>>(params);
}

// `params` holds all of the launch's arguments; `sizes` is the part that has the sizes and the
// kind.
template <typename T, int kLanes, typename Params, typename Sizes>
void start_with_index(const Params& params, const Sizes& sizes, cudaStream_t stream) {
  fits_32_bits(sizes.batch, sizes.hidden) ? start<T, kLanes, uint32_t>(params, stream)
                                          : start<T, kLanes, int64_t>(params, stream);
}

template <typename T, typename Params, typename Sizes>
void start_with_lanes(const Params& params, const Sizes& sizes, cudaStream_t stream) {
  constexpr int kLanes = kLanesOfThread<T>;
  allows_vectors(params, kLanes) ? start_with_index<T, kLanes>(params, sizes, stream)
                                 : start_with_index<T, 1>(params, sizes, stream);
}

template <typename Params, typename Sizes>
LaunchStatus launch(const char* kernel, const Params& params, const Sizes& sizes,
                    cudaStream_t stream) {
  if (sizes.batch == 0 || sizes.hidden == 0) return {kernel, nullptr};
  for_kind(sizes.kind, [&](auto type) {
    start_with_lanes<typename decltype(type)::type>(params, sizes, stream);
  });
  return launch_status(kernel);
}

}  // namespace
}  // namespace tch_extension

// `bias` ([3H]) is first added to the gates; null means zeros. On the CPU the product has added it.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_cell_forward_cuda(
    const LltmCellForward* params, const void* bias, cudaStream_t stream) {
  const tch_extension::Forward forward{*params, bias};
  return tch_extension::launch("lltm_cell_forward", forward, *params, stream);
}

extern "C" tch_extension::LaunchStatus tch_extension_lltm_cell_backward_cuda(
    const LltmCellBackward* params, cudaStream_t stream) {
  return tch_extension::launch("lltm_cell_backward", *params, *params, stream);
}
