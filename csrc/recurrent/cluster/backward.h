// All steps backward in one kernel of clusters; params.h says how blocks share them. A block has
// the gradients for the gates of its own columns only: it multiplies them with W_h for all columns,
// and sends to each block its part of that block's sums.
#pragma once

#include "../../hopper/mma.h"
#include "../cells/gradients.h"
#include "launch.h"

namespace tch_extension::recurrent::cluster {
namespace {

// The part of W_hᵀ that a warp multiplies, in the layout of tensor cores: kSums tiles of columns of
// h, and kProducts products with the block's gates, in which the gates of a tile of columns are
// adjacent. It is in registers, except for the last kShared products, for which there is no room;
// these are in shared memory, [warp, sum, product, lane].
template <typename Cell, typename T, int kPadded, int kCluster, int kShared = 0>
struct HalfBackwardProduct : Shares<kPadded, kCluster> {
  static constexpr int kGates = Cell::kGates;
  using Element = Operand<T>;
  using Stored = std::conditional_t<std::is_same_v<T, ScaledHalf>, float, T>;
  using Gates = float;
  using S = Shares<kPadded, kCluster>;
  static_assert(kTile == kDepth, "a product is a gate of a tile");
  enum : int {
    kIsScaled = std::is_same_v<T, ScaledHalf>,
    kSums = kPadded / kTile / (S::kTiles * kSplits),
    kProducts = kGates * S::kTiles,
    // How many sums are computed at a time.
    kAtATime = 2,
    // Bytes from a row of gates to the next, chosen so that what a warp loads at once is in
    // different banks.
    kStride = kGates * S::kColumns * static_cast<int>(sizeof(Element)) + 16,
    kWeightBytes = S::kThreads * kSums * kShared * static_cast<int>(sizeof(uint4)),
  };

  __device__ void load(const BackwardParams& params, const Place& place, void* memory) {
    const Element* weight = static_cast<const Element*>(params.weight);
    const int hidden = static_cast<int>(params.hidden);
    const int first = static_cast<int>(place.rank) * S::kColumns;
    int lane = place.lane;
    shared = static_cast<uint4*>(memory) + place.warp() * (kSums * kShared * kWarp) + place.lane;
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) {
#pragma unroll
      for (int product = 0; product < kProducts; ++product) {
        const int64_t gate = product % kGates;
        const Element* rows = weight + gate * hidden * params.weight_stride;
        uint32_t parts[4];
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int to = (place.warp() * kSums + sum) * kTile + lane / 4 + part % 2 * 8;
          auto at = [&](int column) {
            return column < hidden && to < hidden ? rows[column * params.weight_stride + to]
                                                  : Element(0.0f);
          };
          parts[part] = operand(at, first + product / kGates * kTile + term_of(part, lane));
        }
        if (product < kProducts - kShared) {
#pragma unroll
          for (int part = 0; part < 4; ++part) weights[sum][product][part] = parts[part];
        } else {
          shared[(sum * kShared + product - (kProducts - kShared)) * kWarp] =
              make_uint4(parts[0], parts[1], parts[2], parts[3]);
        }
        hopper::compiler_barrier(lane);
      }
    }
  }

  // Computes the kAtATime sums from kFirst on.
  template <int kFirst>
  __device__ __forceinline__ void multiply(float (&sums)[kAtATime][4], const unsigned char* gates,
                                           const Place& place) const {
    const uint32_t address =
        hopper::shared_address(gates) + place.lane % 8 * kStride + place.lane / 8 * 16;
    // If the number of products is odd, others may be writing the bytes after the last one, so the
    // last product's two matrices are loaded twice instead.
    const uint32_t back = place.lane & 16 ? 32 : 0;
#pragma unroll
    for (int product = 0; product < kProducts; product += 2) {
      uint32_t b[4];
      hopper::load_matrices(b, address + product * 32 - (product + 1 < kProducts ? 0 : back));
#pragma unroll
      for (int half = 0; half < 2 && product + half < kProducts; ++half) {
        const int now = product + half;
#pragma unroll
        for (int sum = 0; sum < kAtATime; ++sum) {
          if (now < kProducts - kShared) {
            hopper::warp_multiply_add<Element>(sums[sum], weights[kFirst + sum][now], b[2 * half],
                                               b[2 * half + 1]);
          } else {
            const uint4 a =
                shared[((kFirst + sum) * kShared + now - (kProducts - kShared)) * kWarp];
            const uint32_t parts[4] = {a.x, a.y, a.z, a.w};
            hopper::warp_multiply_add<Element>(sums[sum], parts, b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }

  uint32_t weights[kSums][kProducts - kShared][4];
  uint4* shared;
};

// The rows of W_h that belong to the block's gates, in shared memory, [tile, gate, column of the
// tile, H'].
template <typename Cell, typename T, int kPadded, int kCluster>
struct PlainBackwardProduct : Shares<kPadded, kCluster> {
  static constexpr int kGates = Cell::kGates;
  using Element = T;
  using Stored = T;
  using Gates = T;
  using S = Shares<kPadded, kCluster>;
  enum : int {
    kIsScaled = false,
    kSums = kPadded / kTile / (S::kTiles * kSplits),
    kAtATime = kSums,
    kTerms = kGates * S::kColumns,
    kRow = kPadded + kLanesOf16Bytes<T>,
    kStride = kTerms * static_cast<int>(sizeof(T)) + 16,
    kWeightBytes = kTerms * kRow * static_cast<int>(sizeof(T)),
  };

  __device__ void load(const BackwardParams& params, const Place& place, void* memory) {
    const int hidden = static_cast<int>(params.hidden);
    weights = static_cast<T*>(memory);
    const T* from = static_cast<const T*>(params.weight);
    for (int at = threadIdx.x; at < kTerms * kPadded; at += S::kThreads) {
      const int to = at % kPadded, k = at / kPadded;
      const int column =
          static_cast<int>(place.rank) * S::kColumns + k / (kGates * kTile) * kTile + k % kTile;
      const int64_t gate = k / kTile % kGates;
      const bool valid = to < hidden && column < hidden;
      weights[k * kRow + to] =
          valid ? from[(gate * hidden + column) * params.weight_stride + to] : T(0);
    }
  }

  template <int>
  __device__ __forceinline__ void multiply(T (&sums)[kSums][4], const unsigned char* gates,
                                           const Place& place) const {
    using Vector = tch_extension::Vector<T, kLanesOf16Bytes<T>>;
    const T* g0 = reinterpret_cast<const T*>(gates + place.lane % 4 * 2 * kStride);
    const T* g1 = reinterpret_cast<const T*>(gates + (place.lane % 4 * 2 + 1) * kStride);
    const T* w = weights + place.warp() * kSums * kTile + place.lane / 4;
    for (int k = 0; k < kTerms; k += kLanesOf16Bytes<T>) {
      const Vector left = *reinterpret_cast<const Vector*>(g0 + k);
      const Vector right = *reinterpret_cast<const Vector*>(g1 + k);
#pragma unroll
      for (int term = 0; term < kLanesOf16Bytes<T>; ++term) {
#pragma unroll
        for (int sum = 0; sum < kSums; ++sum) {
          const T* from = w + (k + term) * kRow + sum * kTile;
          const T upper = from[0], lower = from[8];
          sums[sum][0] += upper * left.lane[term];
          sums[sum][1] += upper * right.lane[term];
          sums[sum][2] += lower * left.lane[term];
          sums[sum][3] += lower * right.lane[term];
        }
      }
    }
  }

  T* weights;
};

// Layout of shared memory: partial sums from all blocks, for two steps; gradients for the gates of
// two steps, [2, row, tile, gate, column of the tile]; if they are scaled, the largest of each row,
// [2, row, tile], and the factors of a row's sums, [2, row]; weights.
template <typename Product>
struct BackwardLayout {
  enum : int {
    kPartBytes = Product::kTiles * kWarp * 4 * static_cast<int>(sizeof(typename Product::Gates)),
    kPartsBytes = Product::kCluster * kPartBytes,
    kGatesBytes = kRows * Product::kStride,
    kOfRows = Product::kIsScaled ? 2 * kRows * static_cast<int>(sizeof(float)) : 0,
    kParts = 128,  // after the barriers; data from other blocks fills whole lines
    kGatesOfSteps = kParts + 2 * kPartsBytes,
    kLargest = kGatesOfSteps + 2 * kGatesBytes,
    kInverses = kLargest + kOfRows * Product::kTiles,
    kWeights = kInverses + kOfRows,
    kBytes = kWeights + Product::kWeightBytes,
  };
};

// The power of two that takes a number to [2^14, 2^15), and the factor by which sums are then
// multiplied, without kWeightScale. For infinity and for numbers near zero, these are the nearest
// powers of two that are both normal floats.
struct RowScale {
  explicit __device__ __forceinline__ RowScale(uint32_t bits_of_largest) {
    constexpr uint32_t kDigits = 23, kTop = 14, kBias = 127;
    const uint32_t exponent = max(bits_of_largest >> kDigits, 2 * kTop + 1);
    scale = __uint_as_float((2 * kBias + kTop - exponent) << kDigits);
    inverse = __uint_as_float((exponent - 2 * kTop) << kDigits);
  }
  float scale, inverse;
};

// The largest magnitude among all of the block's gates in the lane's row, as bits, which have the
// same order as the numbers. A warp has two rows of its tile; through `of_tiles` it learns the
// maxima of the row's other tiles.
template <int kTiles>
__device__ __forceinline__ uint32_t largest_of_row(float of_lane, uint32_t* of_tiles,
                                                   const Place& place) {
  const uint32_t bits = __float_as_uint(of_lane);
  const bool is_second = place.lane % 2 != 0;
  const uint32_t of_first = __reduce_max_sync(kAllLanes, is_second ? 0 : bits);
  const uint32_t of_second = __reduce_max_sync(kAllLanes, is_second ? bits : 0);
  uint32_t largest = is_second ? of_second : of_first;
  if constexpr (kTiles > 1) {
    if (place.lane < 2) of_tiles[place.tile] = largest;
    hopper::named_barrier_sync(1 + place.split, kTiles * kWarp);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) largest = max(largest, of_tiles[tile]);
  }
  return largest;
}

// The slot for a lane's four sums of a tile, in units of four values. It puts the values of the
// four lanes that share two rows, which another warp reads, into different banks of each 128-byte
// line.
[[maybe_unused]] __device__ __forceinline__ int slot_of(int lane) {
  const int line = lane / 8;
  return line * 8 + (lane % 4 + line) % 4 * 2 + lane / 4 % 2;
}

template <typename G>
__device__ __forceinline__ void send_four(uint32_t to, uint32_t barrier, const G (&of)[4]) {
  if constexpr (sizeof(G) == 4) {
    hopper::store_async(to, barrier,
                        make_uint4(__float_as_uint(of[0]), __float_as_uint(of[1]),
                                   __float_as_uint(of[2]), __float_as_uint(of[3])));
  } else {
#pragma unroll
    for (int at = 0; at < 4; ++at) hopper::store_async(to + at * 8, barrier, of[at]);
  }
}

// What the forward pass saved for a lane in a step, in the types that it has in memory: among it
// the state after the step and, if the cell needs it, the one before.
template <typename Cell, typename S>
struct Saved {
  S grad_output, values[Cell::kSaved], c, previous;
};

// S is the state's type. Indices are 32 bits wide, as in the forward pass.
template <typename Cell, typename S, typename Product>
__global__ void __launch_bounds__(Product::kThreads, Product::kAtHome)
    backward_kernel(const BackwardParams params) {
#if __CUDA_ARCH__ >= 900
  using T = typename Product::Element;
  using G = typename Product::Gates;
  using Stored = typename Product::Stored;
  extern __shared__ __align__(128) unsigned char shared[];
  using L = BackwardLayout<Product>;
  constexpr int kGates = Cell::kGates;
  const Place place(Product::kColumns);
  const uint32_t hidden = static_cast<uint32_t>(params.hidden);
  const int steps = static_cast<int>(params.steps);
  unsigned char* parts = shared + L::kParts;
  const uint32_t arrivals = hopper::shared_address(shared);

  // A lane has one column of one row; a warp has two rows of its tile.
  const int row = place.split * 2 + place.lane % 2;
  const int of_tile = place.lane / 4 + place.lane / 2 % 2 * 8;
  const int column = place.first_column + of_tile;
  const uint32_t batch_row = blockIdx.x / Product::kCluster * kRows + row;
  const uint32_t batch = static_cast<uint32_t>(params.batch);
  const bool valid = batch_row < batch && column < hidden;
  const uint32_t step_size = batch * hidden;
  // The lane's index in a step, as in the forward pass.
  const uint32_t first = batch_row * hidden + column;

  Saved<Cell, S> saved = {};
  auto load = [&](uint32_t at) {
    const S* activations = static_cast<const S*>(params.activations) +
                           (Cell::kSaved * at - (Cell::kSaved - 1) * column);
    if (params.grad_output != nullptr)
      saved.grad_output = static_cast<const S*>(params.grad_output)[at];
    // This is not a loop, because nvcc makes slightly different code of one.
    saved.values[0] = activations[0];
    saved.values[1] = activations[hidden];
    saved.values[2] = activations[2 * hidden];
    if constexpr (Cell::kSaved > 3) saved.values[3] = activations[3 * hidden];
    const S* states = static_cast<const S*>(params.c);
    if constexpr (Cell::kNeedsPreviousState) {
      if (!Cell::kStateIsH) saved.c = saved.previous;
      saved.previous =
          at == first ? static_cast<const S*>(params.c0)[first] : states[at - step_size];
    } else {
      saved.c = states[at];
    }
  };
  uint32_t at = first + (steps - 1) * step_size;
  if (valid) {
    if (Cell::kNeedsPreviousState && !Cell::kStateIsH)
      saved.previous = static_cast<const S*>(params.c)[at];
    load(at);
  }

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) hopper::mbarrier_init<1>(arrivals + 8 * buffer);
    hopper::fence_mbarrier_init();
  }
  G grad_h = valid ? static_cast<const G*>(params.grad_h)[first] : G(0);
  G grad_c = valid ? static_cast<const G*>(params.grad_c)[first] : G(0);
  // The scales of W_h's rows.
  float scales[kGates];
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    scales[gate] =
        Product::kIsScaled && valid ? params.scales[gate * hidden + column] * kWeightScale : 1.0f;
  }
  Product product;
  product.load(params, place, shared + L::kWeights);
  __syncthreads();
  // This comes after a barrier, as racecheck demands, and before any block may send.
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer)
      hopper::mbarrier_arrive_expecting(arrivals + 8 * buffer, L::kPartsBytes);
  }
  __syncwarp();
  hopper::cluster_sync();

  // The position of this lane's partial sum within those of a block: it is among the four sums of
  // the lane that has its rows and column.
  const G* own_parts = reinterpret_cast<const G*>(parts) + place.tile * kWarp * 4 +
                       slot_of(place.lane / 4 * 4 + place.split) * 4 + place.lane % 4;
  auto sum_of_parts = [&](int count) {
    const int buffer = count % 2;
    hopper::mbarrier_wait(arrivals + 8 * buffer, count / 2 % 2);
    // This prepares for the sum after the next one: no block sends for it before this block has
    // sent for the next one.
    if (threadIdx.x == 0) hopper::mbarrier_arrive_expecting(arrivals + 8 * buffer, L::kPartsBytes);
    constexpr int kPart = L::kPartBytes / static_cast<int>(sizeof(G));
    const G* from = own_parts + buffer * Product::kCluster * kPart;
    G sum = 0;
#pragma unroll
    for (int block = 0; block < Product::kCluster; block += 4, from += 4 * kPart) {
      sum += (from[0] + from[kPart]) + (from[2 * kPart] + from[3 * kPart]);
    }
    return sum;
  };

  T* own_gates = reinterpret_cast<T*>(shared + L::kGatesOfSteps + row * Product::kStride) +
                 place.tile * (kGates * kTile) + of_tile;
  for (int done = 0; done < steps; ++done, at -= step_size) {
    hopper::compiler_barrier(at);
    const auto factors =
        Cell::template factors<Activation<T, G>, G>(saved.values, saved.c, saved.previous);
    const G from_output = static_cast<G>(saved.grad_output);
    // Loads the next step's values: they arrive while this step waits and multiplies.
    if (valid && done + 1 < steps) load(at - step_size);

    if (done > 0) {
      // In padding this sum may be NaN: 0 times a gate's gradient that is infinite.
      const G sum = sum_of_parts(done - 1);
      grad_h = valid ? sum : G(0);
    }
    grad_h += from_output;
    // In padding all of these are zero.
    Cell::add_to_state(factors, grad_h, grad_c);
    G grads[kGates];
    gate_gradients<Cell>(factors, grad_h, grad_c, grads);
    const G grad_separate = Cell::separate_gradient(factors, grad_c);
    grad_c = Cell::before_step(factors, grad_c);
    const int buffer = done % 2;
    T* to = own_gates + buffer * (L::kGatesBytes / static_cast<int>(sizeof(T)));
    float* inverses = reinterpret_cast<float*>(shared + L::kInverses) + buffer * kRows;
    if constexpr (Product::kIsScaled) {
      float scaled[kGates];
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) scaled[gate] = grads[gate] * scales[gate];
      float of_lane = fabsf(scaled[0]);
#pragma unroll
      for (int gate = 1; gate < kGates; ++gate) of_lane = fmaxf(of_lane, fabsf(scaled[gate]));
      uint32_t* of_tiles = reinterpret_cast<uint32_t*>(shared + L::kLargest) +
                           (buffer * kRows + row) * Product::kTiles;
      const RowScale of_row(largest_of_row<Product::kTiles>(of_lane, of_tiles, place));
      if (place.tile == 0 && place.lane < 2) inverses[row] = of_row.inverse;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        to[gate * kTile] = static_cast<T>(scaled[gate] * of_row.scale);
    } else {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) to[gate * kTile] = static_cast<T>(grads[gate]);
    }
    __syncthreads();
    if (done + 1 < steps || params.needs_grad_h0) {
      const unsigned char* gates = shared + L::kGatesOfSteps + buffer * L::kGatesBytes;
      const uint32_t to = hopper::shared_address(parts) +
                          (buffer * Product::kCluster + place.rank) * L::kPartBytes +
                          slot_of(place.lane) * 4 * static_cast<int>(sizeof(G));
      // The factors of the sums of this lane's two rows.
      float2 to_size = {};
      if constexpr (Product::kIsScaled)
        to_size = reinterpret_cast<const float2*>(inverses)[place.lane % 4];
      // The first sums are in flight while the others are computed.
      auto send_sums = [&](auto first) {
        G sums[Product::kAtATime][4] = {};
        product.template multiply<first()>(sums, gates, place);
#pragma unroll
        for (int sum = 0; sum < Product::kAtATime; ++sum) {
          const int tile = place.warp() * Product::kSums + first() + sum;
          if constexpr (Product::kIsScaled) {
#pragma unroll
            for (int of = 0; of < 4; ++of) sums[sum][of] *= of % 2 == 0 ? to_size.x : to_size.y;
          }
          send_four(hopper::in_block(
                        to + tile % Product::kTiles * kWarp * 4 * static_cast<int>(sizeof(G)),
                        tile / Product::kTiles),
                    hopper::in_block(arrivals + 8 * buffer, tile / Product::kTiles), sums[sum]);
        }
      };
      send_sums(std::integral_constant<int, 0>{});
      if constexpr (Product::kAtATime < Product::kSums) send_sums(std::integral_constant<int, 2>{});
    }
    if (valid) {
      Stored* grad_gates =
          static_cast<Stored*>(params.grad_gates) + (kGates * at - (kGates - 1) * column);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        grad_gates[gate * hidden] = static_cast<Stored>(grads[gate]);
      if (Cell::kSeparate > 0)
        static_cast<Stored*>(params.grad_separate)[at] = static_cast<Stored>(grad_separate);
    }
  }
  if (params.needs_grad_h0) {
    G sum = sum_of_parts(steps - 1);
    if (Cell::kStateIsH) sum += grad_c;
    if (valid) static_cast<G*>(params.grad_h)[first] = sum;
  }
  if (valid) static_cast<G*>(params.grad_c)[first] = grad_c;
#endif
}

}  // namespace
}  // namespace tch_extension::recurrent::cluster
