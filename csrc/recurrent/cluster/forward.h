// All steps forward in one kernel of clusters; params.h says how blocks share them.
#pragma once

#include "../../hopper/async_copy.h"
#include "../../hopper/mma.h"
#include "launch.h"

namespace tch_extension::recurrent::cluster {
namespace {

// How many steps ahead the input gates are copied.
constexpr int kAhead = 4;

// The part of W_h that a warp multiplies, in the layout of tensor cores: kTerms columns of each
// gate. It is in registers, except for the last kShared products, for which there is no room; these
// are in shared memory, [product, gate, thread].
template <typename Cell, typename T, int kPadded, int kCluster, int kShared = 0>
struct HalfForwardProduct : Shares<kPadded, kCluster> {
  static constexpr int kGates = Cell::kGates, kSeparate = Cell::kSeparate;
  using S = Shares<kPadded, kCluster>;
  using Element = T;
  using Gates = float;
  enum : int {
    kTerms = kPadded / kSplits,
    kProducts = kTerms / kDepth,
    kInRegisters = kProducts - kShared,
    kWeightBytes = kShared * kGates * S::kThreads * static_cast<int>(sizeof(uint4)),
  };

  __device__ void load(const ForwardParams& params, const Place& place, void* memory) {
    const T* weight = static_cast<const T*>(params.weight);
    const int hidden = static_cast<int>(params.hidden);
    int lane = place.lane;
    shared = static_cast<uint4*>(memory) + threadIdx.x;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        uint32_t parts[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int column = place.first_column + lane / 4 + part % 2 * 8;
          const T* row =
              weight + (static_cast<int64_t>(gate) * hidden + column) * params.weight_stride;
          auto at = [&](int k) { return column < hidden && k < hidden ? row[k] : T(0.0f); };
          const int k = place.split * kTerms + product * kDepth + term_of(part, lane);
          parts[part] = operand(at, k);
        }
        if (product < kInRegisters) {
#pragma unroll
          for (int part = 0; part < 4; ++part) weights[product][gate][part] = parts[part];
        } else {
          shared[((product - kInRegisters) * kGates + gate) * S::kThreads] =
              make_uint4(parts[0], parts[1], parts[2], parts[3]);
        }
        hopper::compiler_barrier(lane);
      }
    }
  }

  // Byte offset of a value of h in shared memory, in tiles, [columns / 8, row, 8], even rows first,
  // which is the order in which ldmatrix reads them.
  static __device__ int h_at(int row, int column) {
    return (column / 8 * kRows + row % 2 * 4 + row / 2) * 16 + column % 8 * 2;
  }

  __device__ __forceinline__ void multiply(float (&sums)[kGates][4], const unsigned char* h,
                                           const Place& place) const {
    const int first = place.split * kTerms;
    const uint32_t address =
        hopper::shared_address(h) + h_at(place.lane % 8, first + place.lane / 8 * 8);
#pragma unroll
    for (int product = 0; product < kProducts; product += 2) {
      uint32_t b[4];
      hopper::load_matrices(b, address + product * (kRows * 32));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          const int now = product + half;
          if (now < kInRegisters) {
            hopper::warp_multiply_add<T>(sums[gate], weights[now][gate], b[2 * half],
                                         b[2 * half + 1]);
          } else {
            const uint4 a = shared[((now - kInRegisters) * kGates + gate) * S::kThreads];
            const uint32_t parts[4] = {a.x, a.y, a.z, a.w};
            hopper::warp_multiply_add<T>(sums[gate], parts, b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }

  uint32_t weights[kInRegisters][kGates][4];
  uint4* shared;
};

// The same for float and double, which the tensor cores for half kinds would round. The tensor
// cores for double do not, and multiply float as fast as anything else does. kParts warps share a
// tile's terms.
template <typename Cell, typename T, int kPadded, int kCluster, int kParts>
struct PlainForwardProduct : Shares<kPadded, kCluster, kParts> {
  static constexpr int kGates = Cell::kGates, kSeparate = Cell::kSeparate;
  using Element = T;
  using Gates = T;
  enum : int {
    kLanes = kLanesOf16Bytes<T>,  // terms of a lane per instruction
    kTerms = kPadded / kParts,
    kProducts = kTerms / kSpan<T>,
    kWeightBytes = 0,
  };
  static_assert(kTerms % kSpan<T> == 0, "a warp's terms are whole products");

  __device__ void load(const ForwardParams& params, const Place& place, void*) {
    const T* weight = static_cast<const T*>(params.weight);
    const int hidden = static_cast<int>(params.hidden);
    int lane = place.lane;
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
        for (int of = 0; of < 2 * kLanes; ++of) {
          const int column = place.first_column + lane / 4 + of % 2 * 8;
          const int k = place.split * kTerms + product * kSpan<T> + lane % 4 * kLanes + of / 2;
          const int64_t row = static_cast<int64_t>(gate) * hidden + column;
          const bool valid = column < hidden && k < hidden;
          weights[product][gate][of] = valid ? weight[row * params.weight_stride + k] : T(0);
        }
        hopper::compiler_barrier(lane);
      }
    }
  }

  // Byte offset of a value of h in shared memory, in tiles, [columns / kSpan, row, kSpan].
  static __device__ int h_at(int row, int column) {
    constexpr int kOfRow = kSpan<T>;
    return ((column / kOfRow * kRows + row) * kOfRow + column % kOfRow) *
           static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void multiply(T (&sums)[kGates][4], const unsigned char* h,
                                           const Place& place) const {
    const unsigned char* from =
        h + h_at(place.lane / 4, place.split * kTerms + place.lane % 4 * kLanes);
    double exact[kGates][4] = {};
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
      using Operands = Vector<T, kLanes>;
      const auto of_row = *reinterpret_cast<const Operands*>(from + product * (kRows * 4 * 16));
      double b[kLanes];
#pragma unroll
      for (int at = 0; at < kLanes; ++at) b[at] = of_row.lane[at];
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        hopper::warp_multiply_add(exact[gate], weights[product][gate], b);
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < 4; ++of) sums[gate][of] = static_cast<T>(exact[gate][of]);
    }
  }

  double weights[kProducts][kGates][2 * kLanes];
};

// Sends a tile's columns of h to all blocks. They are first gathered in this block's memory,
// because the time that sending takes depends on the number of lines.
template <typename Product>
struct Outbox {
  enum : int {
    kBytes = kRows * kTile * static_cast<int>(sizeof(typename Product::Element)),
    kLanes = kBytes / 16,
    kAtATime = kSplits * kWarp / kLanes,
  };

  __device__ Outbox(const Place& place, uint32_t h, unsigned char* of_block)
      : staged(of_block + place.tile * kBytes) {
    const int thread = threadIdx.x % (kSplits * kWarp);
    block = thread / kLanes;
    offset = thread % kLanes * 16;
    to = h + place.first_column / kTile * kBytes + offset;
  }

  __device__ __forceinline__ void send(uint32_t buffer, uint32_t barrier) const {
    const uint4 all = *reinterpret_cast<const uint4*>(staged + offset);
#pragma unroll
    for (int more = 0; more < Product::kCluster; more += kAtATime) {
      hopper::store_async(hopper::in_block(to + buffer, block + more),
                          hopper::in_block(barrier, block + more), all);
    }
  }

  unsigned char* staged;
  uint32_t block, offset, to;
};

// Layout of shared memory: h before and after a step; each thread's partial sums; what is to be
// sent; input gates of the next steps; bias, and that of the separate gates; scales; weights.
template <typename Product>
struct ForwardLayout {
  static constexpr int kGates = Product::kGates;
  enum : int {
    kOneGateBytes = Product::kThreads * static_cast<int>(sizeof(typename Product::Gates)),
    kGateBytes = kGates * kOneGateBytes,
    kOwnBytes = kRows * Product::kColumns * static_cast<int>(sizeof(typename Product::Element)),
    kHBytes = kOwnBytes * Product::kCluster,
    kH = 128,  // after the barriers; data from other blocks fills whole lines
    kPartials = kH + 2 * kHBytes,
    kStaged = kPartials + kSplits * kGateBytes,
    kRing = kStaged + kOwnBytes,
    kBias = kRing + kAhead * kGateBytes,
    kScales = kBias + kGateBytes + Product::kSeparate * kOneGateBytes,
    kWeights = kScales + kGateBytes,
    kBytes = kWeights + Product::kWeightBytes,
  };
};

// The sum of a lane's values, which four warps wrote.
template <typename G>
__device__ __forceinline__ G sum_of_four(const G* parts) {
  return (parts[0] + parts[kWarp]) + (parts[2 * kWarp] + parts[3 * kWarp]);
}

// S is the state's type. Indices are 32 bits wide; longer sequences are computed another way.
template <typename Cell, typename S, typename Product>
__global__ void __launch_bounds__(Product::kThreads, Product::kAtHome)
    forward_kernel(const ForwardParams params) {
#if __CUDA_ARCH__ >= 900
  using T = typename Product::Element;
  using G = typename Product::Gates;
  extern __shared__ __align__(128) unsigned char shared[];
  using L = ForwardLayout<Product>;
  constexpr int kThreads = Product::kThreads, kParts = Product::kParts, kGates = Cell::kGates;
  const Place place(Product::kColumns, kParts);
  const uint32_t hidden = static_cast<uint32_t>(params.hidden);
  const int steps = static_cast<int>(params.steps);
  unsigned char* h = shared + L::kH;
  const uint32_t arrivals = hopper::shared_address(shared);

  // A lane finishes one of its four sums of each gate: the one whose index is `split`.
  const int row = place.lane % 4 * 2 + place.split % 2;
  const int of_tile = place.lane / 4 + place.split / 2 * 8;
  const int column = place.first_column + of_tile;
  const uint32_t first_row = blockIdx.x / Product::kCluster * kRows;
  const uint32_t batch = static_cast<uint32_t>(params.batch);
  // Where there are more warps, the surplus ones only multiply.
  const bool finishes = kParts == kSplits || place.split < kSplits;
  const bool valid = finishes && first_row + row < batch && column < hidden;
  const uint32_t step_size = batch * hidden;
  // This lane's index in a step of the output. Its index in a step of G gates is G · index - (G -
  // 1) · column.
  const uint32_t first = (first_row + row) * hidden + column;

  // Each thread reads only what it has copied itself, so that no barrier is needed.
  G* ring = reinterpret_cast<G*>(shared + L::kRing) + threadIdx.x;
  auto fetch = [&](int step, uint32_t at) {
    const G* gates = static_cast<const G*>(params.input_gates);
    const bool wanted = valid && step < steps;
    const uint32_t from = kGates * at - (kGates - 1) * column;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      hopper::copy_async(ring + (step % kAhead * kGates + gate) * kThreads,
                         gates + (wanted ? from + gate * hidden : 0), wanted);
    }
    hopper::commit_copies();
  };
#pragma unroll
  for (int step = 0; step < kAhead; ++step) fetch(step, first + step * step_size);

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) hopper::mbarrier_init<1>(arrivals + 8 * buffer);
    hopper::fence_mbarrier_init();
  }
  for (int at = threadIdx.x; at < kRows * Product::kPadded; at += kThreads) {
    const int of_row = at / Product::kPadded, k = at % Product::kPadded;
    const uint32_t from = first_row + of_row;
    *reinterpret_cast<T*>(h + Product::h_at(of_row, k)) =
        from < batch && k < hidden ? static_cast<const T*>(params.h0)[from * hidden + k] : T(0.0f);
  }
  G* bias = reinterpret_cast<G*>(shared + L::kBias) + threadIdx.x;
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    const bool has = params.bias != nullptr && column < hidden;
    bias[gate * kThreads] = has ? static_cast<const G*>(params.bias)[gate * hidden + column] : G(0);
  }
  G* separate_bias = bias + kGates * kThreads;
#pragma unroll
  for (int gate = 0; gate < Cell::kSeparate; ++gate) {
    const bool has = params.separate_bias != nullptr && column < hidden;
    separate_bias[gate * kThreads] =
        has ? static_cast<const G*>(params.separate_bias)[gate * hidden + column] : G(0);
  }
  // What a lane's sums are multiplied by: the scale of its rows of W_h times that of its row of h.
  constexpr bool kMayScale = std::is_same_v<S, float> && std::is_same_v<T, __half>;
  const bool is_scaled = kMayScale && params.scales != nullptr;
  G message_scale = is_scaled ? G(kMessageScale) : G(1);
  // Where the state is h, |h| is bounded by 1 or by the largest of h0.
  if (Cell::kStateIsH && is_scaled && valid)
    message_scale = min(message_scale, 1 / params.h0_scales[first_row + row]);
  G* scales = reinterpret_cast<G*>(shared + L::kScales) + threadIdx.x;
  auto set_scales = [&](float of_h) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      scales[gate * kThreads] =
          is_scaled && valid ? params.scales[gate * hidden + column] * of_h : G(1);
    }
  };
  if (kMayScale) set_scales(is_scaled && valid ? params.h0_scales[first_row + row] : 1.0f);
  G c = valid ? static_cast<G>(static_cast<const S*>(params.c0)[first]) : G(0);
  Product product;
  product.load(params, place, shared + L::kWeights);
  __syncthreads();
  // This comes after a barrier, as racecheck demands, and before any block may send.
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer)
      hopper::mbarrier_arrive_expecting(arrivals + 8 * buffer, L::kHBytes);
  }
  __syncwarp();
  hopper::cluster_sync();

  // Partial sums, [tile, gate, sum, split, lane]: each warp writes its split of all sums and, if it
  // finishes, reads all splits of its own sum.
  G* partials = reinterpret_cast<G*>(shared + L::kPartials) +
                place.tile * (kGates * 4 * kParts * kWarp) + place.lane;
  G* written = partials + place.split * kWarp;
  const G* read = partials + place.split * (kParts * kWarp);
  const Outbox<Product> outbox(place, hopper::shared_address(h), shared + L::kStaged);
  T* own = reinterpret_cast<T*>(outbox.staged + Product::h_at(row, of_tile));
  uint32_t at = first;
  for (int step = 0; step < steps; ++step, at += step_size) {
    hopper::compiler_barrier(at);
    const int buffer = step % 2;
    const uint32_t arrival = arrivals + 8 * buffer;
    if (step > 0) {
      hopper::mbarrier_wait(arrival, (step - 1) / 2 % 2);
      // This prepares for the step after the next one: no block sends for it before this block has
      // sent for the next one.
      if (threadIdx.x == 0) hopper::mbarrier_arrive_expecting(arrival, L::kHBytes);
    }
    G sums[kGates][4] = {};
    product.multiply(sums, h + buffer * L::kHBytes, place);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < 4; ++of) written[(gate * 4 + of) * kParts * kWarp] = sums[gate][of];
    }
    G gates[kGates], separate[Cell::kSeparate + 1], scale[kGates], saved[Cell::kSaved], new_h;
    if (finishes) {
      hopper::wait_for_copies<kAhead - 1>();
      const G* fetched = ring + step % kAhead * kGates * kThreads;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        gates[gate] = fetched[gate * kThreads] + bias[gate * kThreads];
        scale[gate] = kMayScale ? scales[gate * kThreads] : G(1);
      }
    }
    // All warps reach the same two barriers, as synccheck demands where they are the whole block.
    barrier_of_tile(place, kParts);
    if (finishes) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const G* parts = read + gate * 4 * kParts * kWarp;
        G sum = sum_of_four(parts);
        if constexpr (kParts > kSplits) sum += sum_of_four(parts + 4 * kWarp);
        const int of = gate - (kGates - Cell::kSeparate);
        if (of >= 0) {
          separate[of] = separate_bias[of * kThreads] + sum * scale[gate];
        } else {
          gates[gate] += sum * scale[gate];
        }
      }
      Cell::template forward<Activation<T, G>>(gates, separate, c, new_h, saved);
      // Rows and columns of padding stay zero.
      *own = valid ? static_cast<T>(new_h * message_scale) : T(0.0f);
    }
    // With two barriers per step, what is written before one of them is read before it is
    // overwritten after the other.
    barrier_of_tile(place, kParts);
    if (!finishes) continue;
    if (step + 1 < steps) outbox.send((1 - buffer) * L::kHBytes, arrivals + 8 * (1 - buffer));
    fetch(step + kAhead, at + kAhead * step_size);
    if (is_scaled && step == 0) set_scales(1 / message_scale);
    if (valid) {
      static_cast<S*>(params.output)[at] = static_cast<S>(new_h);
      if (!Cell::kStateIsH && params.c_stride != 0)
        static_cast<S*>(params.c)[at] = static_cast<S>(c);
      if (params.activations != nullptr) {
        S* activations =
            static_cast<S*>(params.activations) + (Cell::kSaved * at - (Cell::kSaved - 1) * column);
        activations[0] = static_cast<S>(saved[0]);
        activations[hidden] = static_cast<S>(saved[1]);
        activations[2 * hidden] = static_cast<S>(Cell::kActivated > 2 ? saved[2] : gates[2]);
        if constexpr (Cell::kSaved > 3) activations[3 * hidden] = static_cast<S>(saved[3]);
      }
    }
  }
  if (!valid) return;
  // Each thread reads what it has written itself.
  if (params.last_h != nullptr)
    static_cast<S*>(params.last_h)[first] = static_cast<const S*>(params.output)[at - step_size];
  void* last_c = params.c_stride == 0 ? params.c : params.last_c;
  if (!Cell::kStateIsH && last_c != nullptr) static_cast<S*>(last_c)[first] = static_cast<S>(c);
#endif
}

}  // namespace
}  // namespace tch_extension::recurrent::cluster
