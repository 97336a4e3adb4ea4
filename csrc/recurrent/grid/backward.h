// All steps backward in one kernel of a grid; params.h says how blocks share them. A block computes
// the gradients for h of its own columns from those for all gates of the next step, which are the
// messages.
#pragma once

#include "../cells/gradients.h"
#include "launch.h"
#include "scaled.h"

namespace tch_extension::recurrent::grid {
namespace {

// How many steps ahead the memory of messages is prefetched, and how many iterations ahead the
// saved values are copied.
[[maybe_unused]] constexpr int kNearBack = 2;  // unused where the kernel is empty
constexpr int kAheadBack = 2;
// From this many sub-batches on, the messages of the next sub-batch are loaded while one is
// multiplied. With fewer, they have not been sent when they are read, which happens early where all
// of them are in flight at once.
template <typename Product>
[[maybe_unused]] constexpr int kSubsAheadBack = Product::kRing < Product::kVectors ? 2 : 3;

// Whether the product's messages are scaled gradients, which are sent in addition to grad_gates.
template <typename Product>
constexpr bool kSendsScaled = false;
template <int... kOf>
constexpr bool kSendsScaled<ScaledProduct<kOf...>> = true;

// The first of the two terms of a word. A term is a gate and a column of h, that is, a row of W_h.
template <typename Cell, typename Product>
__device__ __forceinline__ int term_of(int vector, int half, int word, int hidden) {
  if constexpr (kSendsScaled<Product>) {
    const int column = Product::column_of(vector, half, word);
    return column < hidden ? Product::gate_of(vector) * hidden + column : Cell::kGates * hidden;
  } else {
    return Product::first_term() + vector * Product::kStride + (half * 2 + word) * 2;
  }
}

// Loads the block's part of W_hᵀ.
template <typename Cell, typename Product>
__device__ __forceinline__ void load_weights(Product& product, const BackwardParams& params,
                                             int first_column) {
  using T = typename Product::T;
  const T* weight = static_cast<const T*>(params.weight);
  const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
  auto word = [&](int term, int column) {
    if (term >= Cell::kGates * hidden || column >= hidden) return 0u;
    const T* at = weight + static_cast<int64_t>(term) * params.weight_stride + column;
    return bits_of(at[0]) | bits_of(at[params.weight_stride]) << 16;
  };
#pragma unroll
  for (int fragment = 0; fragment < Product::kFragments; ++fragment) {
    const int tile = fragment % Product::kTiles, half = fragment / Product::kTiles % 2;
    const int vector = fragment / Product::kTiles / 2;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int term = term_of<Cell, Product>(vector, half, part / 2, hidden);
      const int column = first_column + tile * kTile + lane / 4 * 2 + part % 2;
      product.put_weight(vector, half, tile, part, word(term, column));
    }
    if (fragment % 4 == 3) hopper::compiler_barrier();
  }
}

template <typename Cell, typename Product>
__device__ __forceinline__ void load_plain_weights(Product& product, const BackwardParams& params,
                                                   int first_column) {
  const auto* weight = static_cast<const typename Product::T*>(params.weight);
  const int hidden = static_cast<int>(params.hidden);
  product.load_weights([=](int pair, int odd, int term) -> typename Product::T {
    const int column = first_column + pair * 2 + odd;
    if (column >= hidden || term >= Cell::kGates * hidden) return 0;
    return weight[static_cast<int64_t>(term) * params.weight_stride + column];
  });
}

// Layout of the shared memory after that of the product: for each finisher the saved values of its
// next iterations, and the gradients for c of each of its sub-batches, of two columns each. Saved
// values are copied to shared memory because loads into registers would make messages wait for
// them.
template <typename Cell, typename S, typename Product>
struct BackwardLayout {
  using Teams = TeamsOf<Product, Product::kTiles * kTile>;
  // The gradient for the output, what the cell saves, and the states after and before the step, as
  // far as the cell needs them.
  static constexpr int kStates = (Cell::kStateIsH ? 0 : 1) + (Cell::kNeedsPreviousState ? 1 : 0);
  static constexpr int kSaved = 1 + Cell::kSaved + kStates;
  static constexpr int kRing = Teams::kEnd;
  static constexpr int kState =
      kRing + kAheadBack * kSaved * kFinishers * static_cast<int>(sizeof(BitsOfTwo<S>));
  static constexpr int kOfAll =
      kFinishers * static_cast<int>(sizeof(PairOf<typename Product::Sum>));
  // The scales of the rows of W_h that belong to the columns of all finishers.
  static constexpr int kScales = kSendsScaled<Product> ? Cell::kGates * kOfAll : 0;
  static int bytes(int subs) {
    return kState + kScales + ceil_div(subs, static_cast<int>(Teams::kTeams)) * kOfAll;
  }
};

// What finishers do after the products.
template <typename Cell, typename S, typename Product>
struct BackwardFinisher : Member<Product, Product::kTiles * kTile> {
  static constexpr int kGates = Cell::kGates;
  using T = typename Product::T;
  using G = typename Product::Sum;
  using Pair = PairOf<G>;
  using Layout = BackwardLayout<Cell, S, Product>;
  using Base = Member<Product, Product::kTiles * kTile>;
  using Base::at_first, Base::column, Base::index, Base::is_valid, Base::place;
  using Bits = BitsOfTwo<S>;
  enum : int { kTeams = Layout::Teams::kTeams };

  __device__ __forceinline__ BackwardFinisher(const BackwardParams& p,
                                              const Place<Product::kTiles * kTile>& of_block,
                                              unsigned char* memory)
      : Base(of_block, memory), params(p) {
    ring = reinterpret_cast<Bits*>(memory + Layout::kRing) + index;
    scales = reinterpret_cast<Pair*>(memory + Layout::kState) + index;
    state = scales + Layout::kScales / static_cast<int>(sizeof(Pair));
  }

  // An index in [T, B, H]; the first iteration has the last step.
  __device__ __forceinline__ uint32_t at_iteration(const Iteration& iteration) const {
    return (place.steps - 1 - iteration.step) *
               (static_cast<uint32_t>(place.batch) * place.hidden) +
           at_first(iteration.sub);
  }
  // The index in [T, B, V·H] that belongs to an index in [T, B, H].
  template <int kValues>
  __device__ __forceinline__ uint32_t at_values(uint32_t at) const {
    return kValues * at - (kValues - 1) * column;
  }
  __device__ __forceinline__ Pair& of_c(int sub) const { return state[sub / kTeams * kFinishers]; }

  __device__ __forceinline__ void fetch() {
    const bool wanted = fetched.step < place.steps && is_valid(fetched.sub);
    const uint32_t at = wanted ? at_iteration(fetched) : 0,
                   of_values = wanted ? at_values<Cell::kSaved>(at) : 0;
    Bits* to = ring + slot * (Layout::kSaved * kFinishers);
    auto copy = [&](int value, const void* from, uint32_t at) {
      const S* place = static_cast<const S*>(from != nullptr ? from : params.c) + at;
      hopper::copy_async(to + value * kFinishers, reinterpret_cast<const Bits*>(place),
                         wanted && from != nullptr);
    };
    copy(0, params.grad_output, at);
#pragma unroll
    for (int value = 0; value < Cell::kSaved; ++value) {
      copy(1 + value, params.activations, of_values + (wanted ? value * place.hidden : 0));
    }
    if constexpr (!Cell::kStateIsH) copy(1 + Cell::kSaved, params.c, at);
    if constexpr (Cell::kNeedsPreviousState) {
      const bool is_first = fetched.step + 1 == place.steps;
      const uint32_t size = static_cast<uint32_t>(place.batch) * place.hidden;
      const uint32_t before = is_first ? at_first(fetched.sub) : at - size;
      copy(Layout::kSaved - 1, is_first ? params.c0 : params.c, wanted ? before : 0);
    }
    hopper::commit_copies();
    slot = (slot + 1) % kAheadBack;
    this->advance(fetched);
  }

  // The second step is the first to have a product; `last` steps have one.
  __device__ __forceinline__ void run(int last) {
    fetched = this->first_iteration();
    if (fetched.sub >= place.subs) return;
    for (int iteration = 0; iteration < kAheadBack; ++iteration) fetch();
    if constexpr (kSendsScaled<Product>) begin_scales();
    for (int sub = this->team; sub < place.subs; sub += kTeams) {
      const G* from = static_cast<const G*>(params.grad_c) + at_first(sub);
      of_c(sub) = is_valid(sub) ? *reinterpret_cast<const Pair*>(from) : Pair{};
    }
    for (Iteration iteration = this->first_iteration(); iteration.step <= last;
         this->advance(iteration)) {
      const bool valid = is_valid(iteration.sub);
      const Factors of = factors();
      Pair grad_h[1] = {};
      if (iteration.step > 0) {
        this->take(grad_h, (iteration.step - 1) * place.subs + iteration.sub, last * place.subs);
      } else if (valid) {
        grad_h[0] = *grad_h_at(iteration.sub);
      }
      if (iteration.step < place.steps) {
        finish(iteration, grad_h[0], of, valid);
        fetch();
      } else if (valid) {
        if (Cell::kStateIsH) {
          grad_h[0].x += of_c(iteration.sub).x;
          grad_h[0].y += of_c(iteration.sub).y;
        }
        *grad_h_at(iteration.sub) = grad_h[0];
      }
    }
    for (int sub = this->team; sub < place.subs; sub += kTeams) {
      G* to = static_cast<G*>(params.grad_c) + at_first(sub);
      if (is_valid(sub)) *reinterpret_cast<Pair*>(to) = of_c(sub);
    }
  }

  __device__ __forceinline__ Pair* grad_h_at(int sub) const {
    return reinterpret_cast<Pair*>(static_cast<G*>(params.grad_h) + at_first(sub));
  }

  // What the cell can compute for two columns before the gradient for h arrives.
  struct Factors {
    Pair grad_output;
    typename Cell::template Factors<G> first, second;
  };

  // Computes all that is known before the products are complete.
  __device__ __forceinline__ Factors factors() const {
    hopper::wait_for_copies<kAheadBack - 1>();
    auto saved = [&](int value) {
      return values_of<S>(ring[(slot * Layout::kSaved + value) * kFinishers]);
    };
    G first[Cell::kSaved], second[Cell::kSaved];
#pragma unroll
    for (int value = 0; value < Cell::kSaved; ++value) {
      const Pair both = saved(1 + value);
      first[value] = both.x;
      second[value] = both.y;
    }
    const Pair state = Cell::kStateIsH ? Pair{} : saved(1 + Cell::kSaved);
    const Pair previous = Cell::kNeedsPreviousState ? saved(Layout::kSaved - 1) : Pair{};
    Factors of;
    of.grad_output = saved(0);
    of.first = Cell::template factors<Activation<T, G>, G>(first, state.x, previous.x);
    of.second = Cell::template factors<Activation<T, G>, G>(second, state.y, previous.y);
    return of;
  }

  __device__ __forceinline__ void finish(const Iteration& iteration, Pair grad_h, const Factors& of,
                                         bool valid) {
    Pair grad_c = of_c(iteration.sub);
    grad_h.x += of.grad_output.x;
    grad_h.y += of.grad_output.y;
    Cell::add_to_state(of.first, grad_h.x, grad_c.x);
    Cell::add_to_state(of.second, grad_h.y, grad_c.y);
    of_c(iteration.sub) = {Cell::before_step(of.first, grad_c.x),
                           Cell::before_step(of.second, grad_c.y)};
    G grads[kGates][2];
    gate_gradients<Cell>(of.first, of.second, grad_h, grad_c, grads);
    if (Cell::kSeparate > 0 && valid) {
      store_two(static_cast<S*>(params.grad_separate) + at_iteration(iteration),
                Cell::separate_gradient(of.first, grad_c.x),
                Cell::separate_gradient(of.second, grad_c.y));
    }
    if constexpr (kSendsScaled<Product>) {
      send_scaled(iteration, grads, valid);
      if (valid) store(iteration, grads);
    } else if (valid) {
      send(iteration, grads);
    }
  }

  __device__ __forceinline__ void send(const Iteration& iteration,
                                       const G (&grads)[kGates][2]) const {
    T* to = static_cast<T*>(params.grad_gates) + at_values<kGates>(at_iteration(iteration));
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      send_two(to + gate * place.hidden, grads[gate][0], grads[gate][1]);
    }
    // Prefetches the memory of a later step: by then it may have left the L2 cache, and readers
    // would wait for memory.
    if (this->is_first() && iteration.step + kNearBack < place.steps) {
      const int64_t near = static_cast<int64_t>(kNearBack * kGates) * place.batch * place.hidden;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) hopper::prefetch(to + gate * place.hidden - near);
    }
  }

  __device__ __forceinline__ void store(const Iteration& iteration,
                                        const G (&grads)[kGates][2]) const {
    S* to = static_cast<S*>(params.grad_gates) + at_values<kGates>(at_iteration(iteration));
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      store_two(to + gate * place.hidden, grads[gate][0], grads[gate][1]);
    }
  }

  __device__ __forceinline__ void begin_scales() {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      constexpr float kTop = 1 << kTopOfWeights;
      const float* from = params.scales + gate * place.hidden + column;
      scales[gate * kFinishers] =
          column < place.hidden ? make_float2(kTop * from[0], kTop * from[1]) : float2{};
    }
  }

  // Sends scaled gradients; for rows and columns beyond the batch and the hidden size it sends
  // zeros.
  __device__ __forceinline__ void send_scaled(const Iteration& iteration,
                                              const G (&grads)[kGates][2], bool valid) const {
    float values[kGates][2];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float2 of = scales[gate * kFinishers];
      values[gate][0] = valid ? grads[gate][0] * of.x : 0;
      values[gate][1] = valid ? grads[gate][1] * of.y : 0;
    }
    const MessageScale scale(largest_of_row(values));
    const typename Product::Layout layout(params);
    const int64_t sub_batch = layout.sub_batch(iteration.step, place.first_row(iteration.sub));
    const ScaledTarget<typename Product::Layout> to(layout, sub_batch, this->row, column);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      send_two(to.of_gate(gate), values[gate][0] * scale.there, values[gate][1] * scale.there);
    }
    if (!this->is_first()) return;
    // Readers load four of these bytes at once, which PTX's memory model does not cover: on the
    // hardware each byte is either there or not.
    hopper::store_relaxed_byte(to.scale, scale.back);
    // Prefetches the memory of a later step: by then it may have left the L2 cache, and readers
    // would wait for memory.
    if (iteration.step + kNearBack < place.steps) {
      const int near = kNearBack * layout.subs;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        hopper::prefetch(to.words + near * layout.bytes() + gate * kBytesOfVector);
      }
      hopper::prefetch(to.scale + near * layout.bytes_of_scales());
    }
  }

  const BackwardParams& params;
  Bits* ring;
  Pair* scales;
  Pair* state;
  Iteration fetched;
  int slot = 0;
};

// The source of a lane's messages is the next step: its gradients for the gates are the terms.
template <typename Product, int kColumns>
__device__ __forceinline__ ScaledSource scaled_source_of(const BackwardParams& params,
                                                         const Place<kColumns>& place,
                                                         const Iteration& iteration) {
  const typename Product::Layout layout(params);
  return Product::source(layout,
                         layout.sub_batch(iteration.step - 1, place.first_row(iteration.sub)),
                         iteration.step <= place.steps);
}

template <typename Cell, typename Product, int kColumns>
__device__ __forceinline__ Source<typename Product::T> source_of(const BackwardParams& params,
                                                                 const Place<kColumns>& place,
                                                                 const Iteration& iteration) {
  const int row = place.first_row(iteration.sub) + threadIdx.x % kWarp / 4,
            first = Product::first_term();
  const bool valid = iteration.step > 0 && iteration.step <= place.steps && row < place.batch;
  const uint32_t rows = (place.steps - iteration.step) * place.batch + row,
                 size = Cell::kGates * place.hidden;
  const auto* gates = static_cast<const typename Product::T*>(params.grad_gates);
  return {gates + (valid ? rows * size + first : 0), valid ? static_cast<int>(size) - first : 0};
}

template <typename Cell, typename Product, int kColumns>
__device__ __forceinline__ void produce(const BackwardParams& params, const Place<kColumns>& place,
                                        int iterations, unsigned char* memory) {
  Product product(memory + TeamsOf<Product, kColumns>::kWeights);
  if constexpr (Product::kIsPlain) {
    load_plain_weights<Cell>(product, params, place.first_column);
  } else {
    load_weights<Cell>(product, params, place.first_column);
  }
  auto source = [&](const Iteration& iteration) {
    if constexpr (kSendsScaled<Product>) {
      return scaled_source_of<Product>(params, place, iteration);
    } else {
      return source_of<Cell, Product>(params, place, iteration);
    }
  };
  multiply_iterations(product, place, source, Iteration{1, 0}, iterations,
                      place.subs >= kSubsAheadBack<Product>, memory);
}

// S is the state's type. Indices are 32 bits wide; longer sequences are computed another way.
template <typename Cell, typename S, typename Product>
__global__ void __launch_bounds__(kGridThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char grid_shared_back[];
  const Place<Product::kTiles * kTile> place(params);
  const int last = params.needs_grad_h0 ? place.steps : place.steps - 1;
  if (threadIdx.x < kProducers) {
    hopper::take_registers<kProducerRegisters>();
    produce<Cell, Product>(params, place, last * place.subs, grid_shared_back);
  } else {
    hopper::give_registers<kFinisherRegisters>();
    BackwardFinisher<Cell, S, Product>(params, place, grid_shared_back).run(last);
  }
#endif
}

// The size of everything that is sent, counted from the first message.
template <typename Cell, typename Product>
size_t bytes_of_messages(const BackwardParams& params) {
  if constexpr (kSendsScaled<Product>) {
    constexpr int kOfPair = 2;
    const int64_t rows = round_up(params.batch, kRows);
    const int64_t pairs = ceil_div(params.hidden, kOfPair * kTile);
    const float* end = params.exchange_scales + params.steps * rows * pairs * kOfPair;
    return static_cast<size_t>(reinterpret_cast<const unsigned char*>(end) -
                               static_cast<const unsigned char*>(params.exchange));
  } else {
    return static_cast<size_t>(params.steps * params.batch * Cell::kGates * params.hidden) *
           sizeof(typename Product::T);
  }
}

template <typename Cell, typename S, typename Product>
Status start_backward(const BackwardParams& params, cudaStream_t stream) {
  void* messages = kSendsScaled<Product> ? params.exchange : params.grad_gates;
  return start<backward_kernel<Cell, S, Product>, kGridThreads>(
      params, BackwardLayout<Cell, S, Product>::bytes(subs_of(params)), messages,
      bytes_of_messages<Cell, Product>(params), stream);
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
