// All steps forward in one kernel of a wide grid; product.h has what both directions share.
#pragma once

#include "product.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

constexpr int kGateColumns = kGates * kWideColumns;

// Layout of shared memory, in bytes: W_h; sums for the other warpgroup; the bias, and the factors
// of the sums.
template <typename T, int kVectors, bool kWhole>
struct ForwardLayout {
  using Terms = Product<T, kVectors, kWhole, kGateColumns>;
  static constexpr int kSums = Terms::kBytes;
  static constexpr int kSumsOfThread = kGates * 2 * kOwn;
  static constexpr int kBias =
      kSums + kWideThreads * kSumsOfThread * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kBias + 2 * kGateColumns * static_cast<int>(sizeof(float));
};

// Loads W_h into shared memory.
template <typename T, typename Terms>
__device__ __forceinline__ void load_weights(const ForwardParams& params, int first_column,
                                             char* shared) {
  constexpr int kOfRow = Terms::kSpans * 4;
  const int hidden = static_cast<int>(params.hidden);
  const bool whole = reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 &&
                     params.weight_stride % kLanesOf16Bytes<T> == 0;
  for (int at = threadIdx.x; at < kGateColumns * kOfRow; at += kWideThreads) {
    const int row = at / kOfRow, vector = at % kOfRow, span = vector / 4;
    const int column = first_column + column_of(row % kWideColumns, span / (Terms::kSpans / 2));
    const int term = vector * kLanesOf16Bytes<T>;
    uint4 terms = {};
    if (column < hidden && term < hidden) {
      const int64_t of_gate = row / kWideColumns * hidden + column;
      terms = load_terms(
          static_cast<const T*>(params.weight) + of_gate * params.weight_stride + term, whole);
    }
    char* to = shared + span / 2 * Terms::kPart;
    *reinterpret_cast<uint32_t*>(to + place_of(row, span, 0, vector % 4)) = terms.x;
    *reinterpret_cast<uint32_t*>(to + place_of(row, span, 1, vector % 4)) = terms.y;
    *reinterpret_cast<uint32_t*>(to + place_of(row, span, 2, vector % 4)) = terms.z;
    *reinterpret_cast<uint32_t*>(to + place_of(row, span, 3, vector % 4)) = terms.w;
  }
}

[[maybe_unused]] __device__ __forceinline__ void load_bias_and_scales(const ForwardParams& params,
                                                                      int first_column,
                                                                      float* shared) {
  if (threadIdx.x >= kGateColumns) return;
  const int hidden = static_cast<int>(params.hidden);
  const int column = first_column + threadIdx.x % kWideColumns;
  const int of_gate = threadIdx.x / kWideColumns * hidden + column;
  const bool has_bias = params.bias != nullptr && column < hidden;
  const bool has_scale = params.scales != nullptr && column < hidden;
  shared[threadIdx.x] = has_bias ? static_cast<const float*>(params.bias)[of_gate] : 0.0f;
  shared[kGateColumns + threadIdx.x] = has_scale ? params.scales[of_gate] : 1.0f;
}

// Computes all steps of some rows of the batch.
template <typename S, typename T, int kVectors, bool kWhole>
struct Forward : Place {
  using Layout = ForwardLayout<T, kVectors, kWhole>;
  // True for the types of scaled fp16 products, which a state of float with fp16 products under
  // autocast also has.
  static constexpr bool kMayScale = std::is_same_v<S, float> && std::is_same_v<T, __half>;

  __device__ __forceinline__ Forward(const ForwardParams& p, int first_column, char* shared)
      : Place(p.hidden, p.batch, first_column), params(p), terms(*this, hidden, shared) {
    all_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + threadIdx.x % kGroupThreads;
    bias = reinterpret_cast<const float*>(shared + Layout::kBias) + of_block;
    message_scale = params.scales == nullptr ? 1.0f : kMessageScale;
  }

  __device__ __forceinline__ void run(int first_row) {
    begin(first_row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_scale[half] = params.scales == nullptr ? 1.0f : params.h0_scales[some_row_of(0, half)];
    }
    load_c();
    load_gates(0);
    find(0);
    terms.load(0);
    for (int step = 0; step < params.steps; ++step) {
      terms.multiply(sums, step > 0);
      exchange();
      finish(step);
      row_scale[0] = row_scale[1] = 1.0f / message_scale;
    }
    if (params.c_stride != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_own(half))
        store_own(static_cast<S*>(params.c) + row_of(0, half) * hidden + column, c[half]);
    }
  }

  __device__ __forceinline__ void load_c() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) {
        const S* from = static_cast<const S*>(params.c0) + row_of(0, half) * hidden + column + of;
        c[half][of] = is_own(half) ? static_cast<float>(*from) : 0.0f;
      }
    }
  }

  // The index of a gate's sum, for a row and one of the thread's own columns.
  static constexpr __device__ int own(int gate, int half, int of) {
    return gate * kSumsOfGate + of / 2 * 4 + half * 2 + of % 2;
  }

  // Loads the input's part of the gates. Sums without scales start with it.
  __device__ __forceinline__ void load_gates(int step) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* from = static_cast<const float*>(params.input_gates) +
                            row_of(step, half) * (kGates * hidden) + gate * hidden + column;
        const float4 gates = is_own(half) ? *reinterpret_cast<const float4*>(from) : float4{};
        const Own values = {gates.x, gates.y, gates.z, gates.w};
#pragma unroll
        for (int of = 0; of < kOwn; ++of) {
          sums[own(gate, half, of)] = kMayScale ? 0.0f : values[of];
          if constexpr (kMayScale) input[gate][half][of] = values[of];
        }
      }
#pragma unroll
      for (int of_other = kSumsOfGate / 2; of_other < kSumsOfGate; ++of_other) {
        sums[gate * kSumsOfGate + of_other] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ float gate_of(int gate, int half, int of) const {
    const int at = gate * kWideColumns + of;
    const float sum = sums[own(gate, half, of)];
    if constexpr (!kMayScale) return sum + bias[at];
    return sum * bias[kGateColumns + at] * row_scale[half] + (input[gate][half][of] + bias[at]);
  }

  // Finds where the terms are: h of the preceding step.
  __device__ __forceinline__ void find(int step) {
    const T* h = static_cast<const T*>(step == 0 ? params.h0 : params.exchange) + terms.first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      terms.from[half] = h + some_row_of(step == 0 ? 0 : step - 1, half) * hidden;
    }
  }

  // Adds the sums over the other warpgroup's terms.
  __device__ __forceinline__ void exchange() {
    constexpr int kFours = kSumsOfGate / 8;
    auto four = [&](int of_group, int gate, int of) -> float4& {
      return all_sums[((of_group * kGates + gate) * kFours + of) * kGroupThreads];
    };
    wait_for_place();
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kFours; ++of) {
        const float* from = sums + gate * kSumsOfGate + kSumsOfGate / 2 + of * 4;
        four(group, gate, of) = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    wait_for_other();
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kFours; ++of) {
        const float4 others = four(group ^ 1, gate, of);
        float* to = sums + gate * kSumsOfGate + of * 4;
        to[0] += others.x;
        to[1] += others.y;
        to[2] += others.z;
        to[3] += others.w;
      }
    }
    release_other();
  }

  __device__ __forceinline__ void finish(int step) {
    using Activations = Activation<T, float>;
    Own i[2], o[2], g[2], new_h[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) {
        i[half][of] = Activations::sigmoid(gate_of(0, half, of));
        o[half][of] = Activations::sigmoid(gate_of(1, half, of));
        g[half][of] = gate_of(2, half, of);
        c[half][of] += Activations::elu(g[half][of]) * i[half][of];
        new_h[half][of] = Activations::tanh(c[half][of]) * o[half][of];
      }
      if (is_own(half)) send(step, half, new_h[half]);
    }
    const bool is_last = step + 1 == params.steps;
    if (!is_last) load_gates(step + 1);
    if (!is_last) find(step + 1);
    if (is_own(0)) save(step, 0, i[0], o[0], g[0], new_h[0]);
    // These loads start about when the other blocks have sent: earlier loads would have to be
    // repeated.
    if (!is_last) terms.load(0);
    if (is_own(1)) save(step, 1, i[1], o[1], g[1], new_h[1]);
  }

  __device__ __forceinline__ void send(int step, int half, const Own& new_h) const {
    T* to = static_cast<T*>(params.exchange) + row_of(step, half) * hidden + column;
    Own message;
#pragma unroll
    for (int of = 0; of < kOwn; ++of)
      message[of] = kMayScale ? new_h[of] * message_scale : new_h[of];
    send_own(to, message);
  }

  __device__ __forceinline__ void save(int step, int half, const Own& i, const Own& o, const Own& g,
                                       const Own& new_h) const {
    const uint32_t at = row_of(step, half) * hidden + column;
    if constexpr (!std::is_same_v<S, T>) store_own(static_cast<S*>(params.output) + at, new_h);
    if (params.c_stride != 0) store_own(static_cast<S*>(params.c) + at, c[half]);
    if (params.activations != nullptr) {
      S* to = static_cast<S*>(params.activations) + row_of(step, half) * (kGates * hidden) + column;
      store_own(to, i);
      store_own(to + hidden, o);
      store_own(to + 2 * hidden, g);
    }
    // Prefetches the memory of a later step: by then it may have left the L2 cache, and readers
    // would wait for memory. Four lanes share the lines of a row.
    if (step + kWideNear >= params.steps) return;
    const uint32_t ahead = row_of(step + kWideNear, half);
    const int first_column = column - kOwn * of_four;
    if (of_four == kGates) {
      hopper::prefetch(static_cast<const T*>(params.exchange) + ahead * hidden + first_column);
    } else {
      hopper::prefetch(static_cast<const float*>(params.input_gates) +
                       (ahead * kGates + of_four) * hidden + first_column);
    }
  }

  static constexpr int kSumsOfGate = 16;

  const ForwardParams& params;
  typename Layout::Terms terms;
  float4* all_sums;
  const float* bias;
  float message_scale;
  // The scales of the h that is multiplied.
  float row_scale[2];
  float sums[kGates * kSumsOfGate];
  Own input[kGates][2], c[2];
};

// S is the state's type. Indices are 32 bits wide; longer sequences are computed another way.
template <typename S, typename T, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kWideThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char wide_shared[];
  using Layout = ForwardLayout<T, kVectors, kWhole>;
  run_block<Forward<S, T, kVectors, kWhole>>(params, wide_shared, [&](int first_column) {
    load_weights<T, typename Layout::Terms>(params, first_column, wide_shared);
    load_bias_and_scales(params, first_column,
                         reinterpret_cast<float*>(wide_shared + Layout::kBias));
  });
#endif
}

template <typename S, typename T, int kVectors, bool kWhole>
grid::Status start_forward(const ForwardParams& params, cudaStream_t stream) {
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return grid::start<forward_kernel<S, T, kVectors, kWhole>, kWideThreads>(
      params, ForwardLayout<T, kVectors, kWhole>::kBytes, params.exchange, size, stream);
}

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
