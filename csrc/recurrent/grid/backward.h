// The backward of the grid; grid.h says how blocks share it. A block makes the gradients for h of
// its own columns from those for all gates of the step behind, which are the messages.
#pragma once

#include "launch.h"
#include "scaled.h"

namespace tch_extension::recurrent::grid {
namespace {

// Steps whose messages' memory is on its way, and turns of a thread whose saved values are.
[[maybe_unused]] constexpr int kNearBack = 2;  // unused where the kernel is empty
constexpr int kAheadBack = 2;
// From as many sub-batches on, messages of the next are asked for while one is multiplied: of
// fewer, they are not sent before these are read, which is early where all of them are on their way
// at once.
template <typename Product>
[[maybe_unused]] constexpr int kSubsAheadBack = Product::kRing < Product::kVectors ? 2 : 3;

// Whether its messages are gradients times a power of two, beside grad_gates.
template <typename Product>
constexpr bool kSendsScaled = false;
template <int... kOf>
constexpr bool kSendsScaled<ScaledProduct<kOf...>> = true;

// The first of a word's two terms: a gate and a column of h, as rows of W_h.
template <typename Product>
__device__ __forceinline__ int term_of(int vector, int half, int word, int hidden) {
  if constexpr (kSendsScaled<Product>) {
    const int column = Product::column_of(vector, half, word);
    return column < hidden ? Product::gate_of(vector) * hidden + column : kGates * hidden;
  } else {
    return Product::first_term() + vector * Product::kStride + (half * 2 + word) * 2;
  }
}

// W_hᵀ.
template <typename Product>
__device__ __forceinline__ void load_weights(Product& product, const BackwardParams& params,
                                             int first_column) {
  using T = typename Product::T;
  const T* weight = static_cast<const T*>(params.weight);
  const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
  auto word = [&](int term, int column) {
    if (term >= kGates * hidden || column >= hidden) return 0u;
    const T* at = weight + static_cast<int64_t>(term) * params.weight_stride + column;
    return bits_of(at[0]) | bits_of(at[params.weight_stride]) << 16;
  };
#pragma unroll
  for (int fragment = 0; fragment < Product::kFragments; ++fragment) {
    const int tile = fragment % Product::kTiles, half = fragment / Product::kTiles % 2;
    const int vector = fragment / Product::kTiles / 2;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int term = term_of<Product>(vector, half, part / 2, hidden);
      const int column = first_column + tile * kTile + lane / 4 * 2 + part % 2;
      product.put_weight(vector, half, tile, part, word(term, column));
    }
    if (fragment % 4 == 3) hopper::compiler_barrier();
  }
}

template <typename Product>
__device__ __forceinline__ void load_plain_weights(Product& product, const BackwardParams& params,
                                                   int first_column) {
  const auto* weight = static_cast<const typename Product::T*>(params.weight);
  const int hidden = static_cast<int>(params.hidden);
  product.load_weights([=](int pair, int odd, int term) -> typename Product::T {
    const int column = first_column + pair * 2 + odd;
    if (column >= hidden || term >= kGates * hidden) return 0;
    return weight[static_cast<int64_t>(term) * params.weight_stride + column];
  });
}

// Shared memory behind that of the product: of each thread that finishes, saved values of its next
// turns, and gradients for c of each of its sub-batches, of two columns. Were saved values on their
// way to registers, messages would wait for them.
template <typename S, typename Product>
struct BackwardLayout {
  using Teams = TeamsOf<Product, Product::kTiles * kTile>;
  static constexpr int kSaved = 5;
  static constexpr int kRing = Teams::kEnd;
  static constexpr int kState =
      kRing + kAheadBack * kSaved * kFinishers * static_cast<int>(sizeof(BitsOfTwo<S>));
  static constexpr int kOfAll =
      kFinishers * static_cast<int>(sizeof(PairOf<typename Product::Sum>));
  // Of W_h's rows that are its columns'.
  static constexpr int kScales = kSendsScaled<Product> ? kGates * kOfAll : 0;
  static int bytes(int subs) {
    return kState + kScales + ceil_div(subs, static_cast<int>(Teams::kTeams)) * kOfAll;
  }
};

// What is behind the products.
template <typename S, typename Product>
struct BackwardFinisher : Member<Product, Product::kTiles * kTile> {
  using T = typename Product::T;
  using G = typename Product::Sum;
  using Pair = PairOf<G>;
  using Layout = BackwardLayout<S, Product>;
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

  // Of [T, B, H]; the last step is the first turn's.
  __device__ __forceinline__ uint32_t at_iteration(const Iteration& iteration) const {
    return (place.steps - 1 - iteration.step) *
               (static_cast<uint32_t>(place.batch) * place.hidden) +
           at_first(iteration.sub);
  }
  // Of [T, B, 3H], from that of [T, B, H].
  __device__ __forceinline__ uint32_t at_gates(uint32_t at) const {
    return kGates * at - 2 * column;
  }
  __device__ __forceinline__ Pair& of_c(int sub) const { return state[sub / kTeams * kFinishers]; }

  __device__ __forceinline__ void fetch() {
    const bool wanted = fetched.step < place.steps && is_valid(fetched.sub);
    const uint32_t at = wanted ? at_iteration(fetched) : 0, of_gates = wanted ? at_gates(at) : 0;
    Bits* to = ring + slot * (Layout::kSaved * kFinishers);
    auto copy = [&](int value, const void* from, uint32_t at) {
      const S* place = static_cast<const S*>(from != nullptr ? from : params.c) + at;
      hopper::copy_async(to + value * kFinishers, reinterpret_cast<const Bits*>(place),
                         wanted && from != nullptr);
    };
    copy(0, params.grad_output, at);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      copy(1 + gate, params.activations, of_gates + (wanted ? gate * place.hidden : 0));
    }
    copy(4, params.c, at);
    hopper::commit_copies();
    slot = (slot + 1) % kAheadBack;
    this->advance(fetched);
  }

  // Products begin with the second step, `last` of them.
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
        grad_h[0] = *behind(iteration.sub);
      }
      if (iteration.step < place.steps) {
        finish(iteration, grad_h[0], of, valid);
        fetch();
      } else if (valid) {
        *behind(iteration.sub) = grad_h[0];
      }
    }
    for (int sub = this->team; sub < place.subs; sub += kTeams) {
      G* to = static_cast<G*>(params.grad_c) + at_first(sub);
      if (is_valid(sub)) *reinterpret_cast<Pair*>(to) = of_c(sub);
    }
  }

  __device__ __forceinline__ Pair* behind(int sub) const {
    return reinterpret_cast<Pair*>(static_cast<G*>(params.grad_h) + at_first(sub));
  }

  // What gradients are times that for h (the output's added) and that for c.
  struct Factors {
    Pair grad_output, c_of_h, i_of_c, o_of_h, g_of_c;
  };

  // All that is known before the products are.
  __device__ __forceinline__ Factors factors() const {
    hopper::wait_for_copies<kAheadBack - 1>();
    auto saved = [&](int value) {
      return values_of<S>(ring[(slot * Layout::kSaved + value) * kFinishers]);
    };
    const Pair i = saved(1), o = saved(2), g = saved(3), c = saved(4);
    Factors of;
    of.grad_output = saved(0);
    auto of_one = [](G i, G o, G g, G c, G& c_of_h, G& i_of_c, G& o_of_h, G& g_of_c) {
      const G tanh_c = Activation<T, G>::of_c(c);
      c_of_h = o * tanh_grad(tanh_c);
      i_of_c = Activation<T, G>::of_candidate(g) * sigmoid_grad(i);
      o_of_h = tanh_c * sigmoid_grad(o);
      g_of_c = i * Activation<T, G>::candidate_grad(g);
    };
    of_one(i.x, o.x, g.x, c.x, of.c_of_h.x, of.i_of_c.x, of.o_of_h.x, of.g_of_c.x);
    of_one(i.y, o.y, g.y, c.y, of.c_of_h.y, of.i_of_c.y, of.o_of_h.y, of.g_of_c.y);
    return of;
  }

  __device__ __forceinline__ void finish(const Iteration& iteration, Pair grad_h, const Factors& of,
                                         bool valid) {
    Pair grad_c = of_c(iteration.sub);
    grad_h.x += of.grad_output.x;
    grad_h.y += of.grad_output.y;
    grad_c.x += grad_h.x * of.c_of_h.x;
    grad_c.y += grad_h.y * of.c_of_h.y;
    of_c(iteration.sub) = grad_c;
    const G grads[kGates][2] = {{grad_c.x * of.i_of_c.x, grad_c.y * of.i_of_c.y},
                                {grad_h.x * of.o_of_h.x, grad_h.y * of.o_of_h.y},
                                {grad_c.x * of.g_of_c.x, grad_c.y * of.g_of_c.y}};
    if constexpr (kSendsScaled<Product>) {
      send_scaled(iteration, grads, valid);
      if (valid) store(iteration, grads);
    } else if (valid) {
      send(iteration, grads);
    }
  }

  __device__ __forceinline__ void send(const Iteration& iteration,
                                       const G (&grads)[kGates][2]) const {
    T* to = static_cast<T*>(params.grad_gates) + at_gates(at_iteration(iteration));
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      send_two(to + gate * place.hidden, grads[gate][0], grads[gate][1]);
    }
    // By then it may have left the L2 cache, and readers would wait for the memory.
    if (this->is_first() && iteration.step + kNearBack < place.steps) {
      const int64_t near = static_cast<int64_t>(kNearBack * kGates) * place.batch * place.hidden;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) hopper::prefetch(to + gate * place.hidden - near);
    }
  }

  __device__ __forceinline__ void store(const Iteration& iteration,
                                        const G (&grads)[kGates][2]) const {
    S* to = static_cast<S*>(params.grad_gates) + at_gates(at_iteration(iteration));
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

  // Also of rows and columns that there are not: zeros.
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
    // Whoever reads takes four at once, which the memory model says nothing of: on the hardware
    // each byte is there or not.
    hopper::store_relaxed_byte(to.scale, scale.back);
    // By then it may have left the L2 cache, and readers would wait for the memory.
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

// Of the step behind, whose gates are the terms.
template <typename Product, int kColumns>
__device__ __forceinline__ ScaledSource scaled_source_of(const BackwardParams& params,
                                                         const Place<kColumns>& place,
                                                         const Iteration& iteration) {
  const typename Product::Layout layout(params);
  return Product::source(layout,
                         layout.sub_batch(iteration.step - 1, place.first_row(iteration.sub)),
                         iteration.step <= place.steps);
}

template <typename Product, int kColumns>
__device__ __forceinline__ Source<typename Product::T> source_of(const BackwardParams& params,
                                                                 const Place<kColumns>& place,
                                                                 const Iteration& iteration) {
  const int row = place.first_row(iteration.sub) + threadIdx.x % kWarp / 4,
            first = Product::first_term();
  const bool valid = iteration.step > 0 && iteration.step <= place.steps && row < place.batch;
  const uint32_t rows = (place.steps - iteration.step) * place.batch + row,
                 size = kGates * place.hidden;
  const auto* gates = static_cast<const typename Product::T*>(params.grad_gates);
  return {gates + (valid ? rows * size + first : 0), valid ? static_cast<int>(size) - first : 0};
}

template <typename Product, int kColumns>
__device__ __forceinline__ void produce(const BackwardParams& params, const Place<kColumns>& place,
                                        int iterations, unsigned char* memory) {
  Product product(memory + TeamsOf<Product, kColumns>::kWeights);
  if constexpr (Product::kIsPlain) {
    load_plain_weights(product, params, place.first_column);
  } else {
    load_weights(product, params, place.first_column);
  }
  auto source = [&](const Iteration& iteration) {
    if constexpr (kSendsScaled<Product>) {
      return scaled_source_of<Product>(params, place, iteration);
    } else {
      return source_of<Product>(params, place, iteration);
    }
  };
  multiply_iterations(product, place, source, Iteration{1, 0}, iterations,
                      place.subs >= kSubsAheadBack<Product>, memory);
}

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename Product>
__global__ void __launch_bounds__(kGridThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char grid_shared_back[];
  const Place<Product::kTiles * kTile> place(params);
  const int last = params.needs_grad_h0 ? place.steps : place.steps - 1;
  if (threadIdx.x < kProducers) {
    hopper::take_registers<kProducerRegisters>();
    produce<Product>(params, place, last * place.subs, grid_shared_back);
  } else {
    hopper::give_registers<kFinisherRegisters>();
    BackwardFinisher<S, Product>(params, place, grid_shared_back).run(last);
  }
#endif
}

// All that is sent, which begins with the first message.
template <typename Product>
size_t bytes_of_messages(const BackwardParams& params) {
  if constexpr (kSendsScaled<Product>) {
    constexpr int kOfPair = 2;
    const int64_t rows = round_up(params.batch, kRows);
    const int64_t pairs = ceil_div(params.hidden, kOfPair * kTile);
    const float* end = params.exchange_scales + params.steps * rows * pairs * kOfPair;
    return static_cast<size_t>(reinterpret_cast<const unsigned char*>(end) -
                               static_cast<const unsigned char*>(params.exchange));
  } else {
    return static_cast<size_t>(params.steps * params.batch * kGates * params.hidden) *
           sizeof(typename Product::T);
  }
}

template <typename S, typename Product>
Status start_backward(const BackwardParams& params, cudaStream_t stream) {
  void* messages = kSendsScaled<Product> ? params.exchange : params.grad_gates;
  return start<backward_kernel<S, Product>, kGridThreads>(
      params, BackwardLayout<S, Product>::bytes(subs_of(params)), messages,
      bytes_of_messages<Product>(params), stream);
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
