// All steps of a small layer backward, with all gradients; params.h says how threads share them.
#pragma once

#include "../cells/activations.h"
#include "../cells/gradients.h"
#include "tch_extension/scalar_math.h"
#include "team.h"

namespace tch_extension::recurrent::block {
namespace {

// Where the values are that a block adds up: [G·H, F] of W_ih and [G·H, H] of W_hh, if it does, and
// [G + S, H] of the gates' gradients, the last of them those of the input's part of the separate
// gates.
template <typename Cell, bool kOfWeights>
struct Sums {
  __host__ __device__ explicit Sums(const BackwardParams& params)
      : hidden(params.hidden),
        of_h(kOfWeights ? Cell::kGates * params.hidden * params.features : 0),
        of_biases(kOfWeights ? of_h + Cell::kGates * params.hidden * params.hidden : 0),
        count(of_biases + (Cell::kGates + Cell::kSeparate) * params.hidden) {}

  const int64_t hidden, of_h, of_biases, count;
};

// The weights that a thread multiplies the gates' gradients of its terms by, for the gradient of
// its column: of h, or of the input.
template <typename T, typename Team, typename G, int kGates>
__device__ void load_transposed(G (&to)[kGates][Team::kTerms], const void* weight, const Team& team,
                                int hidden, int columns) {
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
    for (int term = 0; term < Team::kTerms; ++term) {
      const int of_gate = team.first_term + term;
      const int64_t row = static_cast<int64_t>(gate) * hidden + of_gate;
      to[gate][term] =
          team.column < columns && of_gate < hidden
              ? static_cast<G>(static_cast<const T*>(weight)[row * columns + team.column])
              : static_cast<G>(0);
    }
  }
}

// A value of each step for a thread, which loads them from the last step to the first.
template <typename T>
struct Backwards {
  __device__ Backwards(const void* values, int64_t at, int64_t of_step, int64_t steps)
      : stride(of_step), left(values == nullptr ? 0 : steps) {
    if (left > 0) next = static_cast<const T*>(values) + at + (steps - 1) * of_step;
  }

  // The same values a step earlier, so that `before_first`, [B, …], comes at step 0.
  __device__ Backwards(const void* values, const void* before_first, int64_t at, int64_t of_step,
                       int64_t steps)
      : Backwards(values, at, of_step, steps) {
    if (values == nullptr) return;
    first = static_cast<const T*>(before_first) + at;
    next = steps == 1 ? first : next - of_step;
  }

  // 0 once there are none.
  __device__ __forceinline__ T load() {
    if (left <= 0) return T(0.0f);
    const T value = *next;
    --left;
    next = left == 1 && first != nullptr ? first : next - stride;
    return value;
  }

  const T *next = nullptr, *first = nullptr;
  int64_t stride, left;
};

// What a thread loads for its column in each step: the gradient for the output, the state before
// the step, h before the step, or the input.
template <typename T>
__device__ Backwards<T> other_values(const BackwardParams& params, int part, int column,
                                     int64_t row) {
  const int64_t columns = part == 3 ? params.features : params.hidden;
  const int64_t at = row * columns + column, of_step = params.batch * columns;
  const int64_t steps = column < columns ? params.steps : 0;
  if (part == 0) return {params.grad_output, at, of_step, steps};
  if (part == 1) return {params.c, params.c0, at, of_step, steps};
  if (part == 2) return {params.output, params.h0, at, of_step, steps};
  return {params.input, at, of_step, steps};
}

template <typename Cell, typename T, int kSize>
__global__ void __launch_bounds__(Team<kSize>::kThreads)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  using G = Compute<T>;
  using Team = Team<kSize>;
  constexpr int kGates = Cell::kGates, kSeparate = Cell::kSeparate, kSums = kGates - kSeparate;
  constexpr int kSaved = Cell::kSaved, kTerms = Team::kTerms, kColumns = kGates + kSeparate;
  static_assert(kColumns <= kParts && kSaved <= kParts, "each thread of a column has one of them");
  __shared__ __align__(16) G gradients[2][kColumns][kSize];
  const Team team;
  const int hidden = static_cast<int>(params.hidden), features = static_cast<int>(params.features);
  const int column = team.column, part = team.part;
  const bool is_there = column < hidden;
  G of_h[kGates][kTerms], of_x[kGates][kTerms];
  load_transposed<T>(of_h, params.w_hh, team, hidden, hidden);
  load_transposed<T>(of_x, params.w_ih, team, hidden, features);
  constexpr bool kSumsWeights = block::kSumsWeights<G, kSize>;
  constexpr int kSummed = kSumsWeights ? kTerms : 1;
  G sums_of_h[kGates][kSummed] = {}, sums_of_x[kGates][kSummed] = {}, sum_of_gate = 0;
  const bool has_gate = is_there && part < kColumns;
  const bool stores_x = params.grad_input != nullptr && part == 0 && column < features;
  for (int64_t row = blockIdx.x; row < params.batch; row += gridDim.x) {
    // The last step of the row before may still be read.
    Team::wait();
    const int64_t of_row = row * hidden + column;
    auto value_of = [&](const void* of) {
      return of == nullptr || !is_there ? G(0) : static_cast<G>(static_cast<const T*>(of)[of_row]);
    };
    G from_next = value_of(params.grad_h), grad_state = value_of(params.grad_c), new_state = 0;
    const int64_t last = (params.steps - 1) * params.batch * hidden;
    if (!Cell::kStateIsH && is_there)
      new_state = static_cast<G>(static_cast<const T*>(params.c)[last + of_row]);
    auto others = other_values<T>(params, part, column, row);
    Backwards<T> activations(params.activations, (row * kSaved + part) * hidden + column,
                             kSaved * params.batch * hidden,
                             is_there && part < kSaved ? params.steps : 0);
    T* to_x = static_cast<T*>(params.grad_input) +
              ((params.steps - 1) * params.batch + row) * features + column;
    // Those of the gates are for products over all steps, if the weights' are not summed here.
    const bool is_of_h = part < kGates;
    const int64_t gates_of_row = (is_of_h ? kGates : kSeparate) * hidden;
    const bool stores_gate = !kSumsWeights && has_gate && params.grad_gates != nullptr;
    T* to_gate = static_cast<T*>(is_of_h ? params.grad_gates : params.grad_separate) +
                 ((params.steps - 1) * params.batch + row) * gates_of_row +
                 (is_of_h ? part : part - kGates) * hidden + column;
    // They are converted where they are used: a conversion waits for the load.
    T saved_ahead[kAhead], others_ahead[kAhead];
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      saved_ahead[slot] = activations.load();
      others_ahead[slot] = others.load();
    }
    for (int64_t first = params.steps - 1; first >= 0; first -= kAhead) {
#pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        if (first < slot) break;
        G saved[kSaved], grads[kGates];
#pragma unroll
        for (int value = 0; value < kSaved; ++value)
          saved[value] = of_part(static_cast<G>(saved_ahead[slot]), value);
        const G other = static_cast<G>(others_ahead[slot]);
        const G grad_output = of_part(other, 0), before = of_part(other, 2), x = of_part(other, 3);
        const G state = Cell::kStateIsH ? before : of_part(other, 1);
        saved_ahead[slot] = activations.load();
        others_ahead[slot] = others.load();
        const auto factors = Cell::template factors<Activation<T, G>, G>(saved, new_state, state);
        new_state = state;
        const G grad_h = grad_output + from_next;
        Cell::add_to_state(factors, grad_h, grad_state);
        gate_gradients<Cell>(factors, grad_h, grad_state, grads);
        G own = select(grads, part);
        if (kSeparate > 0 && part >= kGates) own = Cell::separate_gradient(factors, grad_state);
        grad_state = Cell::before_step(factors, grad_state);
        auto& now = gradients[slot % 2];
        // Where no column is, zeros stay, even if an infinity times a weight of 0 made a NaN.
        if (part < kColumns) now[part][column] = is_there ? own : G(0);
        sum_of_gate += own;
        if (stores_gate) *to_gate = static_cast<T>(own);
        to_gate -= params.batch * gates_of_row;
        // Two buffers: who writes the one of the next step has read that of the last one.
        Team::wait();
        G grad_x = 0;
        from_next = 0;
#pragma unroll
        for (int of = 0; of < kColumns; ++of) {
          G terms[kTerms];
          load_terms(terms, &now[of][team.first_term]);
          const int gate = of < kGates ? of : of - kSeparate;
#pragma unroll
          for (int term = 0; term < kTerms; ++term) {
            if (of < kGates) {
              from_next += of_h[gate][term] * terms[term];
              if (kSumsWeights) sums_of_h[gate][term] += terms[term] * before;
            }
            // Of the separate gates the input has a part of its own.
            if (of < kSums || of >= kGates) {
              grad_x += of_x[gate][term] * terms[term];
              if (kSumsWeights) sums_of_x[gate][term] += terms[term] * x;
            }
          }
        }
        from_next = sum_of_parts(from_next);
        grad_x = sum_of_parts(grad_x);
        if (stores_x) *to_x = static_cast<T>(grad_x);
        to_x -= params.batch * features;
      }
    }
    if (!is_there || part != 0) continue;
    const G of_h0 = Cell::kStateIsH ? from_next + grad_state : from_next;
    if (params.grad_h0 != nullptr) static_cast<T*>(params.grad_h0)[of_row] = static_cast<T>(of_h0);
    if (params.grad_c0 != nullptr)
      static_cast<T*>(params.grad_c0)[of_row] = static_cast<T>(grad_state);
  }
  if (params.sums == nullptr) return;
  const Sums<Cell, kSumsWeights> places(params);
  G* to = static_cast<G*>(params.sums) + blockIdx.x * places.count;
#pragma unroll
  for (int gate = 0; kSumsWeights && gate < kGates; ++gate) {
#pragma unroll
    for (int term = 0; term < kSummed; ++term) {
      const int of_gate = team.first_term + term;
      if (of_gate >= hidden) continue;
      const int64_t at = static_cast<int64_t>(gate) * hidden + of_gate;
      if (column < features) to[at * features + column] = sums_of_x[gate][term];
      if (is_there) to[places.of_h + at * hidden + column] = sums_of_h[gate][term];
    }
  }
  if (has_gate) to[places.of_biases + part * hidden + column] = sum_of_gate;
}

// Adds up what the blocks have summed, always in the same order. A warp has every kWarps-th block.
template <typename Cell, typename T, bool kOfWeights>
__global__ void __launch_bounds__(kThreads)
    sums_kernel(const __grid_constant__ BackwardParams params) {
  using G = Compute<T>;
  constexpr int kWarps = kThreads / kWarp, kSums = Cell::kGates - Cell::kSeparate;
  __shared__ G of_warps[kWarps][kWarp];
  const Sums<Cell, kOfWeights> places(params);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  G sum = 0;
  if (at < places.count) {
    const G* from = static_cast<const G*>(params.sums) + at;
#pragma unroll 4
    for (int block = warp; block < params.blocks; block += kWarps)
      sum += from[block * places.count];
  }
  of_warps[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || at >= places.count) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) sum += of_warps[other][lane];
  auto store = [sum](void* to, int64_t index) {
    if (to != nullptr) static_cast<T*>(to)[index] = static_cast<T>(sum);
  };
  if (at < places.of_h) {
    store(params.grad_w_ih, at);
  } else if (at < places.of_biases) {
    store(params.grad_w_hh, at - places.of_h);
  } else {
    const int64_t row = at - places.of_biases, gates = Cell::kGates * places.hidden;
    const bool is_of_h = row < gates;
    if (is_of_h) store(params.grad_b_hh, row);
    if (row < kSums * places.hidden) store(params.grad_b_ih, row);
    if (!is_of_h) store(params.grad_b_ih, row - Cell::kSeparate * places.hidden);
  }
}

template <typename Cell>
LaunchStatus backward(const char* kernel, const BackwardParams& params, cudaStream_t stream) {
  const int64_t columns = params.hidden > params.features ? params.hidden : params.features;
  const char* error = for_kernels(params.kind, columns, [&](auto of) {
    using Of = decltype(of);
    backward_kernel<Cell, typename Of::Element, Of::kSize>
        <<<params.blocks, Team<Of::kSize>::kThreads, 0, stream>>>(params);
    if (params.sums == nullptr) return;
    using T = typename Of::Element;
    constexpr bool kOfWeights = kSumsWeights<Compute<T>, Of::kSize>;
    const int64_t blocks = ceil_div(Sums<Cell, kOfWeights>(params).count, int64_t{kWarp});
    sums_kernel<Cell, T, kOfWeights>
        <<<static_cast<unsigned int>(blocks), kThreads, 0, stream>>>(params);
  });
  return error == nullptr ? launch_status(kernel) : LaunchStatus{kernel, error};
}

}  // namespace
}  // namespace tch_extension::recurrent::block
