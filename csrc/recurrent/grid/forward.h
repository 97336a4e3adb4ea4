// All steps forward in one kernel of a grid; params.h says how blocks share them.
#pragma once

#include "launch.h"

namespace tch_extension::recurrent::grid {
namespace {

// How many iterations ahead the input gates are copied.
constexpr int kAhead = 3;
// From this many sub-batches on, the messages of the next sub-batch are loaded while one is
// multiplied. With fewer, they have not been sent by then.
[[maybe_unused]] constexpr int kSubsAhead = 3;
[[maybe_unused]] constexpr int kNear = 4;  // unused where the kernel is empty

// All messages of an iteration are in flight at once.
template <typename Cell, typename T, int kColumns, int kVectors, int kShared, int kGroup>
using HalfForwardProduct =
    HalfProduct<T, Cell::kGates * kColumns / kTile, kVectors, kShared, kVectors, kGroup>;

// Loads 16 bytes of a row of W, which may begin at any address unless kWhole.
template <bool kWhole, typename T>
__device__ __forceinline__ uint4 load_vector(const T* from) {
  if constexpr (kWhole) return *reinterpret_cast<const uint4*>(from);
  uint4 vector;
  auto* values = reinterpret_cast<T*>(&vector);
#pragma unroll
  for (int at = 0; at < kLanesOf16Bytes<T>; ++at) values[at] = from[at];
  return vector;
}

// Loads the block's part of W_h: for each gate and each of the block's columns, one row of a tile.
template <typename Cell, bool kWhole, typename Product>
__device__ __forceinline__ void load_weights(Product& product, const ForwardParams& params,
                                             int first_column) {
  using T = typename Product::T;
  constexpr int kOfGate = Product::kTiles / Cell::kGates;
  const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
#pragma unroll
  for (int tile = 0; tile < Product::kTiles; ++tile) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = first_column + tile % kOfGate * kTile + lane / 4 * 2 + odd;
      const T* row = static_cast<const T*>(params.weight) +
                     static_cast<int64_t>(tile / kOfGate * hidden + column) * params.weight_stride;
#pragma unroll
      for (int vector = 0; vector < Product::kVectors; ++vector) {
        const int term = product.first_term() + vector * Product::kStride;
        const bool valid = column < hidden && term < hidden;
        const uint4 of = valid ? load_vector<kWhole>(row + term) : uint4{};
        product.put_weight(vector, 0, tile, odd, of.x);
        product.put_weight(vector, 0, tile, 2 + odd, of.y);
        product.put_weight(vector, 1, tile, odd, of.z);
        product.put_weight(vector, 1, tile, 2 + odd, of.w);
      }
    }
    hopper::compiler_barrier();
  }
}

// The same for PlainProduct, with all columns of a gate followed by those of the next gate.
template <typename Cell, int kColumns, typename Product>
__device__ __forceinline__ void load_plain_weights(Product& product, const ForwardParams& params,
                                                   int first_column) {
  constexpr int kPairs = kColumns / 2;
  const auto* weight = static_cast<const typename Product::T*>(params.weight);
  const int hidden = static_cast<int>(params.hidden);
  product.load_weights([=](int pair, int odd, int term) -> typename Product::T {
    const int gate = pair / kPairs, column = first_column + pair % kPairs * 2 + odd;
    if (gate >= Cell::kGates || column >= hidden || term >= hidden) return 0;
    return weight[static_cast<int64_t>(gate * hidden + column) * params.weight_stride + term];
  });
}

// Layout of the shared memory after that of the product: for each finisher the input gates of its
// next iterations, and c of each of its sub-batches, of two columns each.
template <typename Cell, typename Product, int kColumns>
struct ForwardLayout {
  using Teams = TeamsOf<Product, kColumns>;
  static constexpr int kOfAll =
      kFinishers * static_cast<int>(sizeof(PairOf<typename Product::Sum>));
  static constexpr int kRing = Teams::kEnd;
  static constexpr int kState = kRing + kAhead * Cell::kGates * kOfAll;
  static int bytes(int subs) {
    return kState + ceil_div(subs, static_cast<int>(Teams::kTeams)) * kOfAll;
  }
};

// Adjacent finishers have the same two columns, of as many rows.
constexpr int kSameColumns = 4;
constexpr int kColumnPairs = kFinishers / kSameColumns;

// What finishers keep for their columns.
template <typename Cell, typename Pair, bool kMayScale>
struct ColumnValues {
  // The bias, and that of the separate gates.
  Pair bias[(Cell::kGates + Cell::kSeparate) * kColumnPairs];
  Pair scales[kMayScale ? Cell::kGates * kColumnPairs : 1];
};

// What finishers do after the products: gates and states.
template <typename Cell, typename S, typename Product, int kColumns>
struct ForwardFinisher : Member<Product, kColumns> {
  static constexpr int kGates = Cell::kGates, kSeparate = Cell::kSeparate;
  using T = typename Product::T;
  using G = typename Product::Sum;
  using Pair = PairOf<G>;
  // Whether fp16 values may be multiplied in place of float.
  static constexpr bool kMayScale = std::is_same_v<S, float> && std::is_same_v<T, __half>;
  using Layout = ForwardLayout<Cell, Product, kColumns>;
  using Base = Member<Product, kColumns>;
  using Base::at_first, Base::column, Base::index, Base::is_valid, Base::place;

  __device__ __forceinline__ ForwardFinisher(const ForwardParams& p,
                                             const Place<kColumns>& of_block, unsigned char* memory,
                                             ColumnValues<Cell, Pair, kMayScale>& columns)
      : Base(of_block, memory),
        params(p),
        bias(columns.bias + index / kSameColumns),
        scales(columns.scales + index / kSameColumns) {
    ring = reinterpret_cast<Pair*>(memory + Layout::kRing) + index;
    state = reinterpret_cast<Pair*>(memory + Layout::kState) + index;
  }

  // An index in [T, B, H].
  __device__ __forceinline__ uint32_t at_iteration(const Iteration& iteration) const {
    return iteration.step * (static_cast<uint32_t>(place.batch) * place.hidden) +
           at_first(iteration.sub);
  }
  // The index in [T, B, V·H] that belongs to an index in [T, B, H].
  template <int kValues>
  __device__ __forceinline__ uint32_t at_values(uint32_t at) const {
    return kValues * at - (kValues - 1) * column;
  }
  __device__ __forceinline__ Pair& c_of(int sub) const {
    return state[sub / Layout::Teams::kTeams * kFinishers];
  }

  __device__ __forceinline__ void fetch() {
    const bool wanted = fetched.step < place.steps && is_valid(fetched.sub);
    const G* from = static_cast<const G*>(params.input_gates) +
                    (wanted ? at_values<kGates>(at_iteration(fetched)) : 0);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      hopper::copy_async(ring + (slot * kGates + gate) * kFinishers,
                         reinterpret_cast<const Pair*>(from + (wanted ? gate * place.hidden : 0)),
                         wanted);
    }
    hopper::commit_copies();
    slot = (slot + 1) % kAhead;
    this->advance(fetched);
  }

  // Reads two values of each gate from a row that may begin at any address, for all finishers of
  // the same columns.
  template <int kOf>
  __device__ __forceinline__ void begin_columns(Pair* to, const G* row, G otherwise) {
    const bool is_there = row != nullptr && column < place.hidden;
#pragma unroll
    for (int gate = 0; gate < kOf; ++gate) {
      const G* from = row + gate * place.hidden + column;
      const Pair both = is_there ? Pair{from[0], from[1]} : Pair{otherwise, otherwise};
      if (index % kSameColumns == 0) to[gate * kColumnPairs] = both;
    }
  }

  __device__ __forceinline__ void begin() {
    begin_columns<kGates>(bias, static_cast<const G*>(params.bias), 0);
    if constexpr (kSeparate > 0) {
      begin_columns<kSeparate>(bias + kGates * kColumnPairs,
                               static_cast<const G*>(params.separate_bias), 0);
    }
    if constexpr (kMayScale) begin_columns<kGates>(scales, params.scales, 1);
    __syncwarp();
    for (int sub = this->team; sub < place.subs; sub += Layout::Teams::kTeams) {
      const S* from = static_cast<const S*>(params.c0) + at_first(sub);
      c_of(sub) = is_valid(sub) ? Pair{static_cast<G>(from[0]), static_cast<G>(from[1])} : Pair{};
    }
  }

  __device__ __forceinline__ void run(int iterations) {
    fetched = this->first_iteration();
    if (fetched.sub >= place.subs) return;
    for (int done = 0; done < kAhead; ++done) fetch();
    begin();
    for (Iteration iteration = this->first_iteration(); iteration.step < place.steps;
         this->advance(iteration)) {
      Pair gates[kGates], sums[kGates];
      const float of_message = message_scale(iteration.sub);
      hopper::wait_for_copies<kAhead - 1>();
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const Pair input = ring[(slot * kGates + gate) * kFinishers],
                   of_bias = bias[gate * kColumnPairs];
        gates[gate] = {input.x + of_bias.x, input.y + of_bias.y};
      }
      this->take(sums, iteration.step * place.subs + iteration.sub, iterations);
      if constexpr (kMayScale) scale(sums, iteration, of_message);
#pragma unroll
      for (int gate = 0; gate < kGates - kSeparate; ++gate) {
        gates[gate].x += sums[gate].x;
        gates[gate].y += sums[gate].y;
      }
#pragma unroll
      for (int gate = kGates - kSeparate; gate < kGates; ++gate) {
        const Pair of_bias = bias[(gate + kSeparate) * kColumnPairs];
        sums[gate].x += of_bias.x;
        sums[gate].y += of_bias.y;
      }
      finish(iteration, gates, sums, of_message);
      fetch();
    }
    for (int sub = this->team; sub < place.subs; sub += Layout::Teams::kTeams) {
      if (is_valid(sub)) store_last(at_first(sub), c_of(sub));
    }
  }

  // Stores the state after the last step in addition. Each thread reads the h that it has written
  // itself.
  __device__ __forceinline__ void store_last(uint32_t at, Pair c) const {
    if (params.last_h != nullptr) {
      const uint32_t step = static_cast<uint32_t>(place.batch) * place.hidden;
      const S* h = static_cast<const S*>(params.output) + at + (place.steps - 1) * step;
      S* to = static_cast<S*>(params.last_h) + at;
      to[0] = h[0];
      to[1] = h[1];
    }
    void* last_c = params.c_stride == 0 ? params.c : params.last_c;
    if (!Cell::kStateIsH && last_c != nullptr) store_two(static_cast<S*>(last_c) + at, c.x, c.y);
  }

  // The factor by which a sub-batch's h is multiplied in messages. Where the state is h, |h| is
  // bounded by 1 or by the largest of h0.
  __device__ __forceinline__ float message_scale(int sub) const {
    if (!kMayScale || params.scales == nullptr) return 1;
    if (!Cell::kStateIsH || !is_valid(sub)) return kMessageScale;
    return min(kMessageScale, 1 / params.h0_scales[place.first_row(sub) + this->row]);
  }

  // Undoes the scaling in the sums of fp16 products.
  __device__ __forceinline__ void scale(Pair (&sums)[kGates], const Iteration& iteration,
                                        float of_message) const {
    float of_h = 1 / of_message;
    if (iteration.step == 0 && params.scales != nullptr && is_valid(iteration.sub)) {
      of_h = params.h0_scales[place.first_row(iteration.sub) + this->row];
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const Pair of = scales[gate * kColumnPairs];
      sums[gate].x *= of_h * of.x;
      sums[gate].y *= of_h * of.y;
    }
  }

  // `sums` has the product's part of the separate gates, which are the last ones.
  __device__ __forceinline__ void finish(const Iteration& iteration, const Pair (&gates)[kGates],
                                         const Pair (&sums)[kGates], float of_message) {
    const bool valid = is_valid(iteration.sub);
    const uint32_t at = at_iteration(iteration);
    Pair h, c = c_of(iteration.sub);
    G saved[2][Cell::kSaved];
    G first[kGates], second[kGates];
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      first[gate] = gates[gate].x;
      second[gate] = gates[gate].y;
    }
    const Pair separate = sums[kGates - 1];
    Cell::template forward<Activation<T, G>>(first, &separate.x, c.x, h.x, saved[0]);
    Cell::template forward<Activation<T, G>>(second, &separate.y, c.y, h.y, saved[1]);
    const G of = of_message;
    if (valid) send_two(static_cast<T*>(params.exchange) + at, h.x * of, h.y * of);
    c_of(iteration.sub) = c;
    if (!valid) return;
    if constexpr (!std::is_same_v<S, T>) store_two(static_cast<S*>(params.output) + at, h.x, h.y);
    if (!Cell::kStateIsH && params.c_stride != 0)
      store_two(static_cast<S*>(params.c) + at, c.x, c.y);
    if (params.activations != nullptr) {
      S* activations = static_cast<S*>(params.activations) + at_values<Cell::kSaved>(at);
#pragma unroll
      for (int value = 0; value < Cell::kSaved; ++value, activations += place.hidden) {
        if (value < Cell::kActivated) {
          store_two(activations, saved[0][value], saved[1][value]);
        } else {
          store_two(activations, gates[value].x, gates[value].y);
        }
      }
    }
    // Prefetches the memory of a later step: by then it may have left the L2 cache, and readers
    // would wait for memory.
    if (this->is_first() && iteration.step + kNear < place.steps) {
      hopper::prefetch(static_cast<const T*>(params.exchange) + at +
                       static_cast<uint32_t>(kNear * place.batch) * place.hidden);
    }
  }

  const ForwardParams& params;
  Pair* bias;
  Pair* scales;
  Pair* ring;
  Pair* state;
  Iteration fetched;
  int slot = 0;
};

// The source of a lane's messages is h of the preceding step, or h0.
template <typename Product, int kColumns>
__device__ __forceinline__ Source<typename Product::T> source_of(const ForwardParams& params,
                                                                 const Place<kColumns>& place,
                                                                 const Iteration& iteration) {
  const int row = place.first_row(iteration.sub) + threadIdx.x % kWarp / 4,
            first = Product::first_term();
  const bool valid = iteration.step < place.steps && row < place.batch;
  const void* from = iteration.step == 0 ? params.h0 : params.exchange;
  const uint32_t rows = (iteration.step == 0 ? 0 : iteration.step - 1) * place.batch + row;
  return {static_cast<const typename Product::T*>(from) + (valid ? rows * place.hidden + first : 0),
          valid ? place.hidden - first : 0};
}

template <typename Cell, typename Product, int kColumns>
__device__ __forceinline__ void produce(const ForwardParams& params, const Place<kColumns>& place,
                                        int iterations, unsigned char* memory) {
  constexpr int kVector = kLanesOf16Bytes<typename Product::T>;
  Product product(memory + TeamsOf<Product, kColumns>::kWeights);
  if constexpr (Product::kIsPlain) {
    load_plain_weights<Cell, kColumns>(product, params, place.first_column);
  } else {
    const bool whole =
        reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 && params.weight_stride % kVector == 0;
    whole ? load_weights<Cell, true>(product, params, place.first_column)
          : load_weights<Cell, false>(product, params, place.first_column);
  }
  auto source = [&](const Iteration& iteration) {
    return source_of<Product>(params, place, iteration);
  };
  multiply_iterations(product, place, source, Iteration{}, iterations, place.subs >= kSubsAhead,
                      memory);
}

// S is the state's type. Indices are 32 bits wide; longer sequences are computed another way.
template <typename Cell, typename S, typename Product, int kColumns>
__global__ void __launch_bounds__(kGridThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char grid_shared[];
  using Finisher = ForwardFinisher<Cell, S, Product, kColumns>;
  __shared__ ColumnValues<Cell, typename Finisher::Pair, Finisher::kMayScale> columns;
  const Place<kColumns> place(params);
  const int iterations = place.steps * place.subs;
  if (threadIdx.x < kProducers) {
    hopper::take_registers<kProducerRegisters>();
    produce<Cell, Product>(params, place, iterations, grid_shared);
  } else {
    hopper::give_registers<kFinisherRegisters>();
    Finisher(params, place, grid_shared, columns).run(iterations);
  }
#endif
}

template <typename Cell, typename S, int kColumns, typename Product>
Status start_forward(const ForwardParams& params, cudaStream_t stream) {
  using T = typename Product::T;
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return start<forward_kernel<Cell, S, Product, kColumns>, kGridThreads>(
      params, ForwardLayout<Cell, Product, kColumns>::bytes(subs_of(params)), params.exchange, size,
      stream);
}

}  // namespace
}  // namespace tch_extension::recurrent::grid
