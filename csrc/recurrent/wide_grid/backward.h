// All steps backward in one kernel of a wide grid; product.h has what both directions share.
#pragma once

#include "../cells/gradients.h"
#include "scaled.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

// Layout of shared memory, in bytes: W_h, whose rows are the terms; sums for the other warpgroup;
// scales of the block's own rows of W_h.
template <typename Cell, typename T, int kVectors, bool kWhole>
struct BackwardLayout {
  using Terms = Product<OneTile, T, kVectors, kWhole, kColumns>;
  static constexpr int kSums = Terms::kBytes;
  static constexpr int kScales =
      kSums + OneTile::kThreads * 2 * OneTile::kOwn * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kScales + Cell::kGates * kColumns * static_cast<int>(sizeof(float));
};

// The row of W_h that a term belongs to; negative if there is none.
template <typename Cell, bool kScaled>
__device__ __forceinline__ int row_of_term(int term, int hidden) {
  if (kScaled) return ScaledMessages<Cell::kGates>::row_of_term(term, hidden);
  return term < Cell::kGates * hidden ? term : -1;
}

// Loads W_h into shared memory, two terms of eight columns at a time.
template <typename Cell, typename T, typename Terms, bool kScaled>
__device__ __forceinline__ void load_weights(const BackwardParams& params, int first_column,
                                             char* shared) {
  constexpr int kAtATime = kLanesOf16Bytes<T>, kInARow = kColumns / kAtATime;
  constexpr int kThreads = OneTile::kThreads;
  const int hidden = static_cast<int>(params.hidden);
  const bool whole =
      reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 && params.weight_stride % kAtATime == 0;
  for (int at = threadIdx.x; at < Terms::kSpans * kSpan<T> / 2 * kInARow; at += kThreads) {
    const int term = at / kInARow * 2, columns = at % kInARow * kAtATime;
    const int span = term / kSpan<T>, of_span = term % kSpan<T>;
    uint4 pair[2] = {};
    for (int of = 0; of < 2; ++of) {
      const int row = row_of_term<Cell, kScaled>(term + of, hidden);
      if (row < 0 || first_column + columns >= hidden) continue;
      const T* from = static_cast<const T*>(params.weight) + row * params.weight_stride;
      pair[of] = load_terms(from + first_column + columns, whole);
    }
    const auto* first = reinterpret_cast<const uint16_t*>(&pair[0]);
    const auto* second = reinterpret_cast<const uint16_t*>(&pair[1]);
    for (int of = 0; of < kAtATime; ++of) {
      const int row = product_column_of<OneTile>(columns + of, span / (Terms::kSpans / 2));
      const int place = place_of(row, span, of_span % kAtATime / 2, of_span / kAtATime);
      const uint32_t both = first[of] | static_cast<uint32_t>(second[of]) << 16;
      *reinterpret_cast<uint32_t*>(shared + span / 2 * Terms::kPart + place) = both;
    }
  }
}

template <typename Cell>
__device__ __forceinline__ void load_scales(const BackwardParams& params, int first_column,
                                            float* shared) {
  using Messages = ScaledMessages<Cell::kGates>;
  static_assert(Messages::kSentColumns <= OneTile::kThreads, "each thread loads at most one");
  const int term = threadIdx.x, hidden = static_cast<int>(params.hidden);
  if (term >= Messages::kSentColumns) return;
  const int row = Messages::row_of_term(first_column * Cell::kGates + term, hidden);
  shared[term] = row < 0 ? 0.0f : params.scales[row] * kWeightScale;
}

// Computes all steps of some rows of the batch.
template <typename Cell, typename S, typename T, int kVectors, bool kWhole, bool kScaled>
struct Backward : Place<OneTile> {
  static_assert(!Cell::kNeedsPreviousState || Cell::kStateIsH, "a cell needs one of the states");
  using Layout = BackwardLayout<Cell, T, kVectors, kWhole>;
  enum : int { kGates = Cell::kGates, kOwn = OneTile::kOwn };
  using Own = OneTile::Own;
  using Saved = Vector<S, kOwn>;
  using Messages = ScaledMessages<Cell::kGates>;

  __device__ __forceinline__ Backward(const BackwardParams& p, int first_column, char* shared)
      : Place(p.hidden, p.batch, first_column),
        params(p),
        sent(p),
        terms(*this, kScaled ? Messages::kSentColumns * sent.blocks : kGates * hidden, shared) {
    all_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + threadIdx.x % kGroupThreads;
    weight_scales = reinterpret_cast<const float*>(shared + Layout::kScales) + of_block;
  }

  __device__ __forceinline__ void run(int first_row) {
    begin(first_row);
    const int last = static_cast<int>(params.steps) - 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_state(grad_c[half], params.grad_c, half);
      load_state(grad_h[half], params.grad_h, half);
    }
    load_saved(last);
    finish(last);
    for (int step = last - 1; step >= 0; --step) {
      add_up();
      finish(step);
    }
    if (params.needs_grad_h0) add_up();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      store_state(grad_c[half], params.grad_c, half);
      if (!params.needs_grad_h0) continue;
      if constexpr (Cell::kStateIsH) {
#pragma unroll
        for (int of = 0; of < kOwn; ++of) grad_h[half][of] += grad_c[half][of];
      }
      store_state(grad_h[half], params.grad_h, half);
    }
  }

  __device__ __forceinline__ void load_state(Own& to, const void* state, int half) const {
    load_own(to, static_cast<const float*>(state) + row_of(0, half) * hidden + column,
             is_own(half));
  }
  __device__ __forceinline__ void store_state(const Own& from, void* state, int half) const {
    if (is_own(half))
      store_own(static_cast<float*>(state) + row_of(0, half) * hidden + column, from);
  }

  __device__ __forceinline__ Saved saved_at(const void* from, uint32_t at) const {
    return *reinterpret_cast<const Saved*>(static_cast<const S*>(from) + at);
  }

  __device__ __forceinline__ void load_saved(int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_own(half)) continue;
      const uint32_t row = row_of(step, half), at = row * hidden + column;
#pragma unroll
      for (int value = 0; value < Cell::kSaved; ++value) {
        saved[half][value] =
            saved_at(params.activations, (row * Cell::kSaved + value) * hidden + column);
      }
      if constexpr (!Cell::kNeedsPreviousState) {
        state[half] = saved_at(params.c, at);
      } else if (step == 0) {
        state[half] = saved_at(params.c0, at);
      } else {
        state[half] = saved_at(params.c, (row - batch) * hidden + column);
      }
      if (params.grad_output != nullptr) grad_output[half] = saved_at(params.grad_output, at);
    }
  }

  // Finds where the terms are: the gradients for the step's gates.
  __device__ __forceinline__ void find(int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t from = some_row_of(step, half);
      if constexpr (kScaled) {
        terms.from[half] = sent.of_row(from) + terms.first;
        factors.find(sent, *this, half, from);
      } else {
        terms.from[half] =
            static_cast<const T*>(params.grad_gates) + terms.first + from * (kGates * hidden);
      }
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[16]) {
    if constexpr (!kScaled) {
      terms.multiply(sums, true);
    } else {
      factors.wait();
      terms.multiply(sums, true, [&](int first) {
        factors.template multiply<Layout::Terms::kAtOnce>(terms.messages, first);
      });
#pragma unroll
      for (int at = 0; at < 16; ++at)
        sums[at] = sums[at] / kWeightScale * factors.of_sums[at / 2 % 2];
    }
  }

  // Multiplies, and adds up the sums of both warpgroups.
  __device__ __forceinline__ void add_up() {
    float sums[16] = {};
    multiply(sums);
    auto four = [&](int of_group, int of) -> float4& {
      return all_sums[(of_group * 2 + of) * kGroupThreads];
    };
    wait_for_place();
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const float* from = sums + 8 + of * 4;
      four(group, of) = make_float4(from[0], from[1], from[2], from[3]);
    }
    wait_for_other();
#pragma unroll
    for (int of = 0; of < 2; ++of) {
      const float4 others = four(group ^ 1, of);
      const float* own = sums + of * 4;
      grad_h[0][2 * of] = own[0] + others.x;
      grad_h[0][2 * of + 1] = own[1] + others.y;
      grad_h[1][2 * of] = own[2] + others.z;
      grad_h[1][2 * of + 1] = own[3] + others.w;
    }
    release_other();
  }

  __device__ __forceinline__ void finish(int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Own grads[kGates], separate;
#pragma unroll
      for (int of = 0; of < kOwn; ++of) step_of(half, of, grads, separate[of]);
      if constexpr (kScaled) {
        send_scaled(step, half, grads);
      } else if (is_own(half)) {
        T* to =
            static_cast<T*>(params.grad_gates) + row_of(step, half) * (kGates * hidden) + column;
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) send_own(to + gate * hidden, grads[gate]);
      }
      if (Cell::kSeparate > 0 && is_own(half)) {
        store_own(static_cast<S*>(params.grad_separate) + row_of(step, half) * hidden + column,
                  separate);
      }
    }
    if (step > 0) load_saved(step - 1);
    if (step >= kWideNear) prefetch_all(step - kWideNear);
    if (step == 0 && !params.needs_grad_h0) return;
    find(step);
    if constexpr (kScaled) factors.load();
    terms.load(0);
  }

  // The step of one column.
  __device__ __forceinline__ void step_of(int half, int of, Own (&grads)[kGates], float& separate) {
    auto value_of = [of](const Saved& values) { return static_cast<float>(values.lane[of]); };
    float values[Cell::kSaved], to[kGates];
#pragma unroll
    for (int value = 0; value < Cell::kSaved; ++value) values[value] = value_of(saved[half][value]);
    const float of_state = value_of(state[half]);
    const auto factors =
        Cell::template factors<Activation<T, float>, float>(values, of_state, of_state);
    float of_h = grad_h[half][of];
    if (params.grad_output != nullptr) of_h += value_of(grad_output[half]);
    float& of_c = grad_c[half][of];
    Cell::add_to_state(factors, of_h, of_c);
    gate_gradients<Cell>(factors, of_h, of_c, to);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) grads[gate][of] = to[gate];
    separate = Cell::separate_gradient(factors, of_c);
    of_c = Cell::before_step(factors, of_c);
  }

  // Sends gradients that are multiplied by the scales of their rows of W_h, and zeros beyond the
  // hidden size.
  __device__ __forceinline__ void send_scaled(int step, int half,
                                              const Own (&grads)[kGates]) const {
    Own messages[kGates];
    float largest = 0;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) {
        float& message = messages[gate][of];
        message = column < hidden ? grads[gate][of] * weight_scales[gate * kColumns + of] : 0.0f;
        largest = fmaxf(largest, fabsf(message));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    if (!is_row(half)) return;
    const MessageScale scale(largest);
    const uint32_t row = row_of(step, half);
    const int block = (column - of_block) / kColumns;
    if (of_four == 0) hopper::store_relaxed(sent.scale_of(row, block, group), scale.bits);
    T* to = sent.of_row(row) + block * Messages::kSentColumns + of_block;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) messages[gate][of] *= scale.inverse;
      send_own(to + gate * kColumns, messages[gate]);
    }
    if (column >= hidden) return;
    S* all = static_cast<S*>(params.grad_gates) + row * (kGates * hidden) + column;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) store_own(all + gate * hidden, grads[gate]);
  }

  // Prefetches the memory of an earlier step: by then it may have left the L2 cache or never have
  // been in it, and readers would wait for memory. Four lanes share the lines of a row.
  __device__ __forceinline__ void prefetch_all(int step) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!is_own(half)) continue;
      const uint32_t row = row_of(step, half);
      const int first_column = column - kOwn * of_four, block = first_column / kColumns;
      const uint32_t at = row * hidden + first_column;
      if (of_four < Cell::kSaved) {
        hopper::prefetch(static_cast<const S*>(params.activations) +
                         (row * Cell::kSaved + of_four) * hidden + first_column);
      }
      if (of_four < kGates) {
        if constexpr (kScaled) {
          hopper::prefetch(sent.of_row(row) + block * Messages::kSentColumns +
                           (kGates * group + of_four) * OneTile::kGroupColumns);
        } else {
          hopper::prefetch(static_cast<const T*>(params.grad_gates) +
                           (row * kGates + of_four) * hidden + first_column);
        }
      }
      if (of_four != kGates % 4) continue;
      if constexpr (kScaled) hopper::prefetch(sent.scale_of(row, block, group));
      hopper::prefetch(static_cast<const S*>(params.c) + at);
      if (params.grad_output != nullptr)
        hopper::prefetch(static_cast<const S*>(params.grad_output) + at);
    }
  }

  const BackwardParams& params;
  const Messages sent;
  typename Layout::Terms terms;
  ScaleFactors<Cell::kGates, kVectors / Cell::kGates, kWhole> factors;
  float4* all_sums;
  const float* weight_scales;
  Own grad_h[2], grad_c[2];
  // What the next step to be finished reads. `state` is the one before that step if the cell needs
  // it, and otherwise the one after it.
  Saved saved[2][Cell::kSaved], state[2], grad_output[2];
};

// S is the state's type. Indices are 32 bits wide; longer sequences are computed another way.
template <typename Cell, typename S, typename T, int kVectors, bool kWhole, bool kScaled>
__global__ void __launch_bounds__(OneTile::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char wide_shared[];
  using Layout = BackwardLayout<Cell, T, kVectors, kWhole>;
  using Rows = Backward<Cell, S, T, kVectors, kWhole, kScaled>;
  run_block<OneTile, Rows>(params, wide_shared, [&](int first_column) {
    load_weights<Cell, T, typename Layout::Terms, kScaled>(params, first_column, wide_shared);
    if constexpr (kScaled) {
      load_scales<Cell>(params, first_column,
                        reinterpret_cast<float*>(wide_shared + Layout::kScales));
    }
  });
#endif
}

template <typename Cell, typename S, typename T, int kVectors, bool kWhole, bool kScaled>
grid::Status start_backward(const BackwardParams& params, void* messages, int64_t size,
                            cudaStream_t stream) {
  constexpr int kBytes = BackwardLayout<Cell, T, kVectors, kWhole>::kBytes;
  return grid::start<backward_kernel<Cell, S, T, kVectors, kWhole, kScaled>, OneTile::kThreads>(
      params, kBytes, messages, static_cast<size_t>(size), stream);
}

template <typename Cell, typename S, typename T, int kVectors, bool kWhole>
grid::Status start_backward(const BackwardParams& params, cudaStream_t stream) {
  const int64_t rows = params.steps * params.batch;
  if constexpr (std::is_same_v<S, float> && std::is_same_v<T, __half>) {
    if (params.scales != nullptr) {
      // The scales follow the messages in memory.
      auto* messages = static_cast<char*>(params.exchange);
      const int64_t blocks = grid::blocks_of(params) / params.row_groups;
      const int64_t size =
          reinterpret_cast<char*>(params.exchange_scales + rows * (ceil_div(blocks, 4) * 8)) -
          messages;
      return start_backward<Cell, S, T, kVectors, kWhole, true>(params, messages, size, stream);
    }
  }
  if constexpr (std::is_same_v<S, T> || Cell::kHasMixedKinds) {
    const int64_t size = rows * Cell::kGates * params.hidden * static_cast<int64_t>(sizeof(T));
    return start_backward<Cell, S, T, kVectors, kWhole, false>(params, params.grad_gates, size,
                                                               stream);
  }
  return {true, kNoKernel};
}

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
