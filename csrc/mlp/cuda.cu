// The kernels are memory-bound. Each reads and writes every array once, 16 bytes per thread where
// sizes and addresses allow, and asks for several vectors before it waits for one.

#include <type_traits>

#include "../hopper/dependent_launch.h"
#include "activations.h"
#include "tch_extension/cuda_column_sums.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::mlp {
namespace {

template <typename T, int kLanes>
__device__ __forceinline__ void store_vector(void* pointer, int64_t at,
                                             const Vector<T, kLanes>& vector) {
  *reinterpret_cast<Vector<T, kLanes>*>(static_cast<T*>(pointer) + at) = vector;
}

// a = act(z).
struct Activated {
  static constexpr int kUnroll = 4;

  const void* input;
  void* output;
  MlpActivation activation;

  template <typename T, int kLanes>
  __device__ __forceinline__ Vector<T, kLanes> fetch(int64_t at) const {
    return load_vector<T, kLanes>(input, at);
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ void store(const Vector<T, kLanes>& fetched, int64_t at) const {
    const Values<T, kLanes> x = unpack<T, kLanes>(fetched);
    store_vector<T, kLanes>(output, at, slopes<T, kLanes>(activation, x, x).value);
  }
};

template <typename T, int kLanes>
struct Pair {
  Vector<T, kLanes> first;
  Vector<T, kLanes> second;
};

// dz = da act'(z), of which columns can be summed, and a.
struct Differentiated {
  // Two arrays are read, so unrolling further would leave registers for fewer threads.
  static constexpr int kUnroll = 2;

  const void* grad;
  const void* input;
  void* grad_input;
  void* output;
  int64_t columns;
  MlpActivation activation;

  template <typename T, int kLanes>
  __device__ __forceinline__ Pair<T, kLanes> fetch(int64_t at) const {
    return {load_vector<T, kLanes>(grad, at), load_vector<T, kLanes>(input, at)};
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ Values<T, kLanes> store(const Pair<T, kLanes>& fetched,
                                                     int64_t at) const {
    const auto result = slopes<T, kLanes>(activation, unpack<T, kLanes>(fetched.first),
                                          unpack<T, kLanes>(fetched.second));
    store_values<T, kLanes>(grad_input, at, result.gradient);
    if (output != nullptr) store_vector<T, kLanes>(output, at, result.value);
    return result.gradient;
  }

  // As cuda_column_sums.h wants them.
  template <typename T, int kLanes>
  __device__ __forceinline__ Pair<T, kLanes> fetch(int64_t row, int64_t column) const {
    return fetch<T, kLanes>(row * columns + column);
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ Values<T, kLanes> values(const Pair<T, kLanes>& fetched, int64_t row,
                                                      int64_t column) const {
    return store<T, kLanes>(fetched, row * columns + column);
  }
};

// h = silu(g) u.
struct Gated {
  static constexpr int kUnroll = 2;

  const void* gate;
  const void* up;
  void* output;

  template <typename T, int kLanes>
  __device__ __forceinline__ Pair<T, kLanes> fetch(int64_t at) const {
    return {load_vector<T, kLanes>(gate, at), load_vector<T, kLanes>(up, at)};
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ void store(const Pair<T, kLanes>& fetched, int64_t at) const {
    const Values<T, kLanes> x = unpack<T, kLanes>(fetched.first);
    Values<T, kLanes> h = unpack<T, kLanes>(fetched.second);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) h.lane[lane] *= silu<T>(x.lane[lane]).value;
    store_values<T, kLanes>(output, at, h);
  }
};

template <typename T, int kLanes>
struct Triple {
  Vector<T, kLanes> grad;
  Vector<T, kLanes> gate;
  Vector<T, kLanes> up;
};

// dg = dh u silu'(g), du = dh silu(g), and h.
struct GateDifferentiated {
  static constexpr int kUnroll = 2;

  const void* grad;
  const void* gate;
  const void* up;
  void* grad_gate;
  void* grad_up;
  void* output;

  template <typename T, int kLanes>
  __device__ __forceinline__ Triple<T, kLanes> fetch(int64_t at) const {
    return {load_vector<T, kLanes>(grad, at), load_vector<T, kLanes>(gate, at),
            load_vector<T, kLanes>(up, at)};
  }

  template <typename T, int kLanes>
  __device__ __forceinline__ void store(const Triple<T, kLanes>& fetched, int64_t at) const {
    const Values<T, kLanes> dh = unpack<T, kLanes>(fetched.grad);
    const Values<T, kLanes> x = unpack<T, kLanes>(fetched.gate);
    const Values<T, kLanes> u = unpack<T, kLanes>(fetched.up);
    Values<T, kLanes> dg;
    Values<T, kLanes> du;
    Values<T, kLanes> h;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const Slope<Compute<T>> slope = silu<T>(x.lane[lane]);
      dg.lane[lane] = dh.lane[lane] * u.lane[lane] * slope.derivative;
      du.lane[lane] = dh.lane[lane] * slope.value;
      h.lane[lane] = slope.value * u.lane[lane];
    }
    store_values<T, kLanes>(grad_gate, at, dg);
    store_values<T, kLanes>(grad_up, at, du);
    if (output != nullptr) store_values<T, kLanes>(output, at, h);
  }
};

// Calls fetch and then store for each vector of arrays of `count` values. An output may be in the
// place of an input, because each thread reads a vector before it writes there.
template <typename T, int kLanes, int kUnroll, typename Body>
__global__ void __launch_bounds__(kThreads) for_each_kernel(Body body, int64_t count) {
  constexpr int64_t kBlock = static_cast<int64_t>(kThreads) * kUnroll;
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  const int64_t vectors = count / kLanes;
  for (int64_t first = blockIdx.x * kBlock + threadIdx.x; first < vectors;
       first += gridDim.x * kBlock) {
    decltype(body.template fetch<T, kLanes>(0)) fetched[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t vector = first + i * kThreads;
      if (vector < vectors) fetched[i] = body.template fetch<T, kLanes>(vector * kLanes);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t vector = first + i * kThreads;
      if (vector < vectors) body.template store<T, kLanes>(fetched[i], vector * kLanes);
    }
  }
  if constexpr (kLanes > 1) {
    // The values after the last whole vector.
    const int64_t at = vectors * kLanes + threadIdx.x;
    if (blockIdx.x == 0 && at < count) {
      body.template store<T, 1>(body.template fetch<T, 1>(at), at);
    }
  }
}

template <typename T, typename Body>
void start(const Body& body, int64_t count, bool is_aligned, cudaStream_t stream) {
  const auto start_with = [&](auto lanes) {
    constexpr int kLanes = decltype(lanes)::value;
    // With fewer blocks than GPUs have multiprocessors, each thread has one vector: several
    // activations one after another would take longer than the memory does.
    constexpr unsigned int kFew = 128;
    const unsigned int blocks = blocks_for(ceil_div(count, int64_t{kLanes} * Body::kUnroll));
    if (blocks < kFew) {
      const unsigned int more = blocks_for(ceil_div(count, int64_t{kLanes}));
      hopper::launch_early(for_each_kernel<T, kLanes, 1, Body>, more, kThreads, 0, stream, body,
                           count);
    } else {
      for_each_kernel<T, kLanes, Body::kUnroll><<<blocks, kThreads, 0, stream>>>(body, count);
    }
  };
  is_aligned ? start_with(std::integral_constant<int, kLanesOf16Bytes<T>>{})
             : start_with(std::integral_constant<int, 1>{});
}

template <typename... Pointers>
bool are_aligned(Pointers... pointers) {
  return (is_aligned_to_16(pointers) && ...);
}

LaunchStatus launch(const MlpActivate& params, cudaStream_t stream) {
  constexpr const char* kName = "mlp_activate";
  if (params.count == 0) return {kName, nullptr};
  const Activated body{params.input, params.output, params.activation};
  const bool is_aligned = are_aligned(params.input, params.output);
  for_kind(params.kind, [&](auto type) {
    start<typename decltype(type)::type>(body, params.count, is_aligned, stream);
  });
  return launch_status(kName);
}

LaunchStatus launch(const MlpGate& params, cudaStream_t stream) {
  constexpr const char* kName = "mlp_gate";
  if (params.count == 0) return {kName, nullptr};
  const Gated body{params.gate, params.up, params.output};
  const bool is_aligned = are_aligned(params.gate, params.up, params.output);
  for_kind(params.kind, [&](auto type) {
    start<typename decltype(type)::type>(body, params.count, is_aligned, stream);
  });
  return launch_status(kName);
}

LaunchStatus launch(const MlpGateBackward& params, cudaStream_t stream) {
  constexpr const char* kName = "mlp_gate_backward";
  if (params.count == 0) return {kName, nullptr};
  const GateDifferentiated body{params.grad,      params.gate,    params.up,
                                params.grad_gate, params.grad_up, params.output};
  const bool is_aligned = are_aligned(params.grad, params.gate, params.up, params.grad_gate,
                                      params.grad_up, params.output);
  for_kind(params.kind, [&](auto type) {
    start<typename decltype(type)::type>(body, params.count, is_aligned, stream);
  });
  return launch_status(kName);
}

template <typename T>
void start_with_sums(const TchExtensionColumnSums& sums, const Differentiated& body,
                     bool is_aligned, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  is_aligned&& sums.columns % kLanes == 0 ? start_column_sums<T, kLanes>(sums, body, stream)
                                          : start_column_sums<T, 1>(sums, body, stream);
  if (sums.slabs > 1) finish_column_sums<T>(sums, stream);
}

LaunchStatus launch(const MlpDifferentiate& params, cudaStream_t stream) {
  constexpr const char* kName = "mlp_differentiate";
  const TchExtensionColumnSums& sums = params.sums;
  const int64_t count = sums.rows * sums.columns;
  // Without rows the sums are zeros, which still have to be written.
  if (sums.sums == nullptr ? count == 0 : sums.columns == 0) return {kName, nullptr};
  const Differentiated body{params.grad,   params.input, params.grad_input,
                            params.output, sums.columns, params.activation};
  const bool is_aligned = are_aligned(params.grad, params.input, params.grad_input, params.output);
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    sums.sums == nullptr ? start<T>(body, count, is_aligned, stream)
                         : start_with_sums<T>(sums, body, is_aligned, stream);
  });
  return launch_status(kName);
}

}  // namespace
}  // namespace tch_extension::mlp

using tch_extension::LaunchStatus;

extern "C" LaunchStatus tch_extension_mlp_activate_cuda(const MlpActivate* params,
                                                        cudaStream_t stream) {
  return tch_extension::mlp::launch(*params, stream);
}

extern "C" LaunchStatus tch_extension_mlp_differentiate_cuda(const MlpDifferentiate* params,
                                                             cudaStream_t stream) {
  return tch_extension::mlp::launch(*params, stream);
}

extern "C" LaunchStatus tch_extension_mlp_gate_cuda(const MlpGate* params, cudaStream_t stream) {
  return tch_extension::mlp::launch(*params, stream);
}

extern "C" LaunchStatus tch_extension_mlp_gate_backward_cuda(const MlpGateBackward* params,
                                                             cudaStream_t stream) {
  return tch_extension::mlp::launch(*params, stream);
}
