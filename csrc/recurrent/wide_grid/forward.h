// All steps forward in one kernel of a wide grid; product.h has what both directions share.
#pragma once

#include "product.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

// Layout of shared memory, in bytes: W_h; sums for the other warpgroup; the bias, which the
// separate gates have twice, and the factors of the sums.
template <typename Cell, typename Shape, typename T, int kVectors, bool kWhole>
struct ForwardLayout {
  static constexpr int kGateColumns = Cell::kGates * Shape::kColumns;
  static constexpr int kBiases = (Cell::kGates + Cell::kSeparate) * Shape::kColumns;
  using Terms = Product<Shape, T, kVectors, kWhole, kGateColumns>;
  static constexpr int kSums = Terms::kBytes;
  static constexpr int kSumsOfThread = Cell::kGates * 2 * Shape::kOwn;
  static constexpr int kBias =
      kSums + Shape::kThreads * kSumsOfThread * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kBias + (kBiases + kGateColumns) * static_cast<int>(sizeof(float));
};

// Loads W_h into shared memory.
template <typename Cell, typename Shape, typename T, typename Terms>
__device__ __forceinline__ void load_weights(const ForwardParams& params, int first_column,
                                             char* shared) {
  constexpr int kOfRow = Terms::kSpans * 4, kColumns = Shape::kColumns;
  const int hidden = static_cast<int>(params.hidden);
  const bool whole = reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 &&
                     params.weight_stride % kLanesOf16Bytes<T> == 0;
  for (int at = threadIdx.x; at < Cell::kGates * kColumns * kOfRow; at += Shape::kThreads) {
    const int row = at / kOfRow, vector = at % kOfRow, span = vector / 4;
    const int group = span / (Terms::kSpans / 2);
    const int column = first_column + column_of<Shape>(row % kColumns, group);
    const int term = vector * kLanesOf16Bytes<T>;
    uint4 terms = {};
    if (column < hidden && term < hidden) {
      const int64_t of_gate = row / kColumns * hidden + column;
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

template <typename Cell, typename Shape, typename Layout>
__device__ __forceinline__ void load_bias_and_scales(const ForwardParams& params, int first_column,
                                                     float* shared) {
  const int hidden = static_cast<int>(params.hidden);
  for (int at = threadIdx.x; at < Layout::kBiases + Layout::kGateColumns; at += Shape::kThreads) {
    const bool is_scale = at >= Layout::kBiases, is_separate = at >= Layout::kGateColumns;
    const int of = is_scale ? at - Layout::kBiases : is_separate ? at - Layout::kGateColumns : at;
    const int column = first_column + of % Shape::kColumns;
    const void* from = is_scale ? params.scales : is_separate ? params.separate_bias : params.bias;
    const bool is_there = from != nullptr && column < hidden;
    const int64_t index = static_cast<int64_t>(of / Shape::kColumns) * hidden + column;
    shared[at] = is_there ? static_cast<const float*>(from)[index] : is_scale ? 1.0f : 0.0f;
  }
}

// Computes all steps of some rows of the batch.
template <typename Cell, typename Shape, typename S, typename T, int kVectors, bool kWhole>
struct Forward : Place<Shape> {
  using Base = Place<Shape>;
  using Base::batch, Base::column, Base::group, Base::hidden, Base::is_own, Base::of_block,
      Base::of_four, Base::row_of, Base::some_row_of;
  using Layout = ForwardLayout<Cell, Shape, T, kVectors, kWhole>;
  using Own = typename Shape::Own;
  enum : int { kGates = Cell::kGates, kOwn = Shape::kOwn, kColumns = Shape::kColumns };
  // True for the types of scaled fp16 products, which a state of float with fp16 products under
  // autocast also has.
  static constexpr bool kMayScale = std::is_same_v<S, float> && std::is_same_v<T, __half>;
  // For so many of the last gates the input's part is kept apart from the sums.
  static constexpr int kApart = kMayScale ? Cell::kGates : Cell::kSeparate;

  __device__ __forceinline__ Forward(const ForwardParams& p, int first_column, char* shared)
      : Base(p.hidden, p.batch, first_column), params(p), terms(*this, hidden, shared) {
    all_sums = reinterpret_cast<float4*>(shared + Layout::kSums) +
               threadIdx.x / (2 * kGroupThreads) * (2 * Layout::kSumsOfThread / 4 * kGroupThreads) +
               threadIdx.x % kGroupThreads;
    bias = reinterpret_cast<const float*>(shared + Layout::kBias) + of_block;
  }

  __device__ __forceinline__ void run(int first_row) {
    this->begin(first_row);
    begin_scales();
    load_c();
    load_gates(0);
    find(0);
    terms.load(0);
    for (int step = 0; step < params.steps; ++step) {
      terms.multiply(sums, step > 0);
      exchange();
      finish(step);
#pragma unroll
      for (int half = 0; half < 2; ++half) row_scale[half] = 1.0f / message_scale[half];
    }
    store_last();
  }

  // Stores the state after the last step in addition. Each thread reads the h that it has written
  // itself.
  __device__ __forceinline__ void store_last() const {
    void* last_c = params.c_stride == 0 ? params.c : params.last_c;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_own(half)) continue;
      const uint32_t to = row_of(0, half) * hidden + column;
      const uint32_t from = row_of(params.steps - 1, half) * hidden + column;
      if (params.last_h != nullptr) {
        *reinterpret_cast<Vector<S, kOwn>*>(static_cast<S*>(params.last_h) + to) =
            *reinterpret_cast<const Vector<S, kOwn>*>(static_cast<const S*>(params.output) + from);
      }
      if (!Cell::kStateIsH && last_c != nullptr) store_own(static_cast<S*>(last_c) + to, c[half]);
    }
  }

  // The factor by which a row's h is multiplied in messages. Where the state is h, |h| is bounded
  // by 1 or by the largest of h0.
  __device__ __forceinline__ void begin_scales() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool scales = kMayScale && params.scales != nullptr;
      row_scale[half] = scales ? params.h0_scales[some_row_of(0, half)] : 1.0f;
      message_scale[half] = scales ? kMessageScale : 1.0f;
      if (scales && Cell::kStateIsH)
        message_scale[half] = fminf(kMessageScale, 1.0f / row_scale[half]);
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

  // Loads the input's part of the gates. Sums begin with it, unless it is kept apart.
  __device__ __forceinline__ void load_gates(int step) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const bool apart = gate >= kGates - kApart;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* from = static_cast<const float*>(params.input_gates) +
                            row_of(step, half) * (kGates * hidden) + gate * hidden + column;
        Own values;
        load_own(values, from, is_own(half));
#pragma unroll
        for (int of = 0; of < kOwn; ++of) {
          sums[own(gate, half, of)] = apart ? 0.0f : values[of];
          if (apart) input[gate - (kGates - kApart)][half][of] = values[of];
        }
      }
#pragma unroll
      for (int of_other = kSumsOfGate / 2; of_other < kSumsOfGate; ++of_other) {
        sums[gate * kSumsOfGate + of_other] = 0.0f;
      }
    }
  }

  // The sum of a gate's products, without what scaling has multiplied it by.
  __device__ __forceinline__ float product_of(int gate, int half, int of) const {
    const float sum = sums[own(gate, half, of)];
    if constexpr (!kMayScale) return sum;
    return sum * bias[Layout::kBiases + gate * kColumns + of] * row_scale[half];
  }

  // A gate before its activation; of a separate gate only the input's part.
  __device__ __forceinline__ float gate_of(int gate, int half, int of) const {
    const float of_bias = bias[gate * kColumns + of];
    if (gate < kGates - kApart) return sums[own(gate, half, of)] + of_bias;
    const float of_input = input[gate - (kGates - kApart)][half][of] + of_bias;
    if (gate >= kGates - Cell::kSeparate) return of_input;
    return product_of(gate, half, of) + of_input;
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
    this->wait_for_place();
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kFours; ++of) {
        const float* from = sums + gate * kSumsOfGate + kSumsOfGate / 2 + of * 4;
        four(group, gate, of) = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    this->wait_for_other();
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
    this->release_other();
  }

  __device__ __forceinline__ void finish(int step) {
    Own saved[2][Cell::kSaved], new_h[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) step_of(half, of, saved[half], new_h[half][of]);
      if (is_own(half)) send(step, half, new_h[half]);
    }
    const bool is_last = step + 1 == params.steps;
    if (!is_last) load_gates(step + 1);
    if (!is_last) find(step + 1);
    if (is_own(0)) save(step, 0, saved[0], new_h[0]);
    // These loads start about when the other blocks have sent: earlier loads would have to be
    // repeated.
    if (!is_last) terms.load(0);
    if (is_own(1)) save(step, 1, saved[1], new_h[1]);
  }

  // The step of one column.
  __device__ __forceinline__ void step_of(int half, int of, Own (&saved)[Cell::kSaved],
                                          float& new_h) {
    float gates[kGates], values[Cell::kSaved];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) gates[gate] = gate_of(gate, half, of);
    float separate = 0;
    if constexpr (Cell::kSeparate > 0)
      separate = product_of(kGates - 1, half, of) + bias[kGates * kColumns + of];
    Cell::template forward<Activation<T, float>>(gates, &separate, c[half][of], new_h, values);
#pragma unroll
    for (int value = 0; value < Cell::kSaved; ++value) {
      saved[value][of] = value < Cell::kActivated ? values[value] : gates[value];
    }
  }

  __device__ __forceinline__ void send(int step, int half, const Own& new_h) const {
    T* to = static_cast<T*>(params.exchange) + row_of(step, half) * hidden + column;
    Own message;
#pragma unroll
    for (int of = 0; of < kOwn; ++of)
      message[of] = kMayScale ? new_h[of] * message_scale[half] : new_h[of];
    send_own(to, message);
  }

  __device__ __forceinline__ void save(int step, int half, const Own (&saved)[Cell::kSaved],
                                       const Own& new_h) const {
    const uint32_t at = row_of(step, half) * hidden + column;
    if constexpr (!std::is_same_v<S, T>) store_own(static_cast<S*>(params.output) + at, new_h);
    if (!Cell::kStateIsH && params.c_stride != 0)
      store_own(static_cast<S*>(params.c) + at, c[half]);
    if (params.activations != nullptr) {
      S* to = static_cast<S*>(params.activations) + row_of(step, half) * (Cell::kSaved * hidden) +
              column;
#pragma unroll
      for (int value = 0; value < Cell::kSaved; ++value)
        store_own(to + value * hidden, saved[value]);
    }
    // Prefetches the memory of a later step: by then it may have left the L2 cache, and readers
    // would wait for memory. Four lanes share the lines of a row.
    if (step + kWideNear >= params.steps) return;
    const uint32_t ahead = row_of(step + kWideNear, half);
    const int first_column = column - kOwn * of_four;
    if (of_four == kGates % 4)
      hopper::prefetch(static_cast<const T*>(params.exchange) + ahead * hidden + first_column);
    if (of_four < kGates) {
      hopper::prefetch(static_cast<const float*>(params.input_gates) +
                       (ahead * kGates + of_four) * hidden + first_column);
    }
  }

  static constexpr int kSumsOfGate = kColumns / 2;

  const ForwardParams& params;
  typename Layout::Terms terms;
  float4* all_sums;
  const float* bias;
  float message_scale[2];
  // The scales of the h that is multiplied.
  float row_scale[2];
  float sums[kGates * kSumsOfGate];
  Own input[kApart > 0 ? kApart : 1][2], c[2];
};

// S is the state's type. Indices are 32 bits wide; longer sequences are computed another way.
template <typename Cell, typename Shape, typename S, typename T, int kVectors, bool kWhole>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char wide_shared[];
  using Layout = ForwardLayout<Cell, Shape, T, kVectors, kWhole>;
  using Rows = Forward<Cell, Shape, S, T, kVectors, kWhole>;
  run_block<Shape, Rows>(params, wide_shared, [&](int first_column) {
    load_weights<Cell, Shape, T, typename Layout::Terms>(params, first_column, wide_shared);
    load_bias_and_scales<Cell, Shape, Layout>(
        params, first_column, reinterpret_cast<float*>(wide_shared + Layout::kBias));
  });
#endif
}

template <typename Cell, typename Shape, typename S, typename T, int kVectors, bool kWhole>
grid::Status start_forward(const ForwardParams& params, cudaStream_t stream) {
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return grid::start<forward_kernel<Cell, Shape, S, T, kVectors, kWhole>, Shape::kThreads>(
      params, ForwardLayout<Cell, Shape, T, kVectors, kWhole>::kBytes, params.exchange, size,
      stream);
}

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
