// What the kernels of a wide grid share; grid/params.h says how blocks share a sequence. A block
// computes tiles of kWideRows rows at once, with products of warpgroups: its part of W_h is in
// shared memory, and what the other blocks send is loaded into registers.
#pragma once

#include "../../hopper/bulk_copy.h"
#include "../../hopper/wgmma.h"
#include "../grid/launch.h"

namespace tch_extension::recurrent::wide_grid {
namespace {

using grid::BackwardParams;
using grid::ForwardParams;

constexpr int kWideRows = 64;
constexpr int kGroupThreads = 4 * kWarp;

// What a block computes: some columns of h, of one tile of rows or of more tiles at once. For each
// tile two warpgroups share the terms of the sums, and then finish half of the columns each.
template <int kOfColumns, int kOfTiles>
struct Shape {
  enum : int {
    kColumns = kOfColumns,
    kTiles = kOfTiles,
    kRowsAtOnce = kTiles * kWideRows,
    kThreads = kTiles * 2 * kGroupThreads,
    kGroupColumns = kColumns / 2,
    // Adjacent columns per thread, in each of its two rows.
    kOwn = kGroupColumns / 4,
  };
  using Own = float[kOwn];

  static __device__ __forceinline__ int blocks(int64_t hidden) {
    return (static_cast<int>(hidden) + kColumns - 1) / kColumns;
  }
};

// The weights of three gates fit a block with 32 columns of up to 1024 terms.
using OneTile = Shape<32, 1>;
// Those of four gates do not. With half as many columns and two tiles a block reads twice as many
// messages, and the warpgroups of a tile multiply while those of the other wait for theirs.
using TwoTiles = Shape<16, 2>;

// Bytes of a row of shared memory, swizzled: 64 terms.
constexpr int kWideRow = 128;
// How many steps ahead messages and operands are prefetched: the L2 cache has room for that many,
// also with a state of float.
constexpr int kWideNear = 2;

// Named barriers, each for the warps of a tile that have the same rows, one of each warpgroup, and
// with two tiles for two adjacent such pairs. kSent: sums have been written. kRead to kRead + 3:
// sums of the first warpgroup may be overwritten; kRead + 4 to kRead + 7: those of the second.
enum : int { kSent = 1, kRead = 5 };

template <int kCount>
__device__ __forceinline__ void load_own(float (&to)[kCount], const float* from, bool is_there) {
  const auto own =
      is_there ? *reinterpret_cast<const Vector<float, kCount>*>(from) : Vector<float, kCount>{};
#pragma unroll
  for (int of = 0; of < kCount; ++of) to[of] = own.lane[of];
}

template <typename S, int kCount>
__device__ __forceinline__ void store_own(S* to, const float (&values)[kCount]) {
  Vector<S, kCount> own;
#pragma unroll
  for (int of = 0; of < kCount; ++of) own.lane[of] = static_cast<S>(values[of]);
  *reinterpret_cast<Vector<S, kCount>*>(to) = own;
}

// Sends one message of two or four values. Its first two values tell whether it has been sent: two
// values whose bits are all ones are replaced by another NaN.
template <typename T, int kCount>
__device__ __forceinline__ void send_own(T* to, const float (&values)[kCount]) {
  constexpr uint32_t kNone = 0xffffffff, kNotANumber = 0x7fffffff;
  Vector<T, kCount> own;
#pragma unroll
  for (int of = 0; of < kCount; ++of) own.lane[of] = static_cast<T>(values[of]);
  const auto* words = reinterpret_cast<const uint32_t*>(&own);
  const uint32_t first = words[0] == kNone ? kNotANumber : words[0];
  if constexpr (kCount == 2) {
    hopper::store_relaxed(to, first);
  } else {
    hopper::store_relaxed_whole(to, first, words[1]);
  }
}

// The column of the block that a column of the product belongs to, among the columns of one gate
// and for one of the warpgroups, and the inverse. In the product, the columns that a warpgroup
// finishes come first, and each thread has adjacent ones of these.
template <typename Shape>
__device__ __forceinline__ int column_of(int of_product, int group) {
  constexpr int kOwn = Shape::kOwn, kEights = kOwn / 2;
  const int eight = of_product / 8, of_eight = of_product % 8;
  return Shape::kGroupColumns * (group ^ (eight / kEights)) + of_eight / 2 * kOwn +
         eight % kEights * 2 + of_eight % 2;
}
template <typename Shape>
__device__ __forceinline__ int product_column_of(int column, int group) {
  constexpr int kOwn = Shape::kOwn, kGroupColumns = Shape::kGroupColumns;
  const int eight = (column / kGroupColumns ^ group) * (kOwn / 2) + column % kOwn / 2;
  return eight * 8 + column % kGroupColumns / kOwn * 2 + column % 2;
}

// Swizzled shared-memory offset of one mma operand word. A lane's 16 bytes of a span are for two
// products: each takes two terms of the lane, and the two that are 8 further on.
__device__ __forceinline__ int place_of(int row, int span, int word, int lane) {
  return row * kWideRow + ((span % 2 * 4 + word) ^ (row % 8)) * 16 + lane * 4;
}

// Loads 16 bytes of a row of W, which may begin at any address unless `whole`.
template <typename T>
__device__ __forceinline__ uint4 load_terms(const T* from, bool whole) {
  if (whole) return *reinterpret_cast<const uint4*>(from);
  uint4 terms;
  auto* values = reinterpret_cast<T*>(&terms);
  for (int at = 0; at < kLanesOf16Bytes<T>; ++at) values[at] = from[at];
  return terms;
}

// Zeros to load in place of terms beyond the last one.
__device__ uint4 wide_zeros;

// The position of a thread: it has row lane / 4 of its warp's 16 rows of the product, and the row 8
// below.
template <typename Shape>
struct Place {
  __device__ __forceinline__ Place(int64_t hidden_size, int64_t rows, int first_column)
      : hidden(static_cast<int>(hidden_size)), batch(static_cast<int>(rows)) {
    const int lane = threadIdx.x % kWarp, tile = threadIdx.x / (2 * kGroupThreads);
    const int warp = tile * 4 + threadIdx.x % kGroupThreads / kWarp;
    group = threadIdx.x / kGroupThreads % 2;
    barrier = warp / Shape::kTiles;
    of_four = lane % 4;
    of_rows = warp * 16 + lane / 4;
    of_block = Shape::kGroupColumns * group + Shape::kOwn * of_four;
    column = first_column + of_block;
  }

  __device__ __forceinline__ void begin(int first_row) {
    row = first_row + of_rows;
    any_row = first_row;
  }
  __device__ __forceinline__ bool is_row(int half) const { return row + 8 * half < batch; }
  __device__ __forceinline__ bool is_own(int half) const { return is_row(half) && column < hidden; }
  // The index of a row among those of all steps.
  __device__ __forceinline__ uint32_t row_of(int step, int half) const {
    return static_cast<uint32_t>(step) * batch + row + 8 * half;
  }
  // A row to read from. For rows beyond the batch it is another row, and what is computed from it
  // is not used.
  __device__ __forceinline__ uint32_t some_row_of(int step, int half) const {
    return static_cast<uint32_t>(step) * batch + (is_row(half) ? row + 8 * half : any_row);
  }

  // Lets the other warpgroup overwrite its sums.
  __device__ __forceinline__ void release_other() const {
    hopper::named_barrier_arrive(kRead + (group ^ 1) * 4 + barrier, kThreadsOfBarrier);
  }
  __device__ __forceinline__ void wait_for_place() const {
    hopper::named_barrier_sync(kRead + group * 4 + barrier, kThreadsOfBarrier);
  }
  __device__ __forceinline__ void wait_for_other() const {
    hopper::named_barrier_sync(kSent + barrier, kThreadsOfBarrier);
  }

  static constexpr int kThreadsOfBarrier = Shape::kTiles * 2 * kWarp;

  const int hidden, batch;
  int group, barrier, of_four, of_rows, of_block, column, row, any_row;
};

// The products. A thread has kVectors vectors of 16 bytes of each of its two rows; kWhole says that
// none of them is beyond the last term. They are loaded kAtOnce at a time, while the preceding ones
// are multiplied.
template <typename Shape, typename T, int kVectors, bool kWhole, int kColumns>
struct Product {
  static constexpr int kAtOnce = 4;
  // Whether there are not enough registers for all vectors at once: waiting for the preceding
  // products frees theirs.
  static constexpr bool kFrees = kVectors > 4 * kAtOnce || Shape::kTiles > 1;
  static constexpr int kPart = kColumns * kWideRow;
  static constexpr int kSpans = 2 * kVectors;
  static constexpr int kBytes = kSpans / 2 * kPart;

  __device__ __forceinline__ Product(const Place<Shape>& place, int terms, const char* shared) {
    first = (place.group * kVectors * 4 + place.of_four) * kLanesOf16Bytes<T>;
    vectors = first < terms ? (terms - 1 - first) / kSpan<T> + 1 : 0;
    weights = static_cast<uint32_t>(hopper::tile_descriptor<false>(hopper::shared_address(shared) +
                                                                   place.group * (kBytes / 2)));
  }

  __device__ __forceinline__ void load(int begin) {
    // Computes the addresses anew: if they were kept for repeating the loads, they would take too
    // many registers.
    int all = vectors;
    hopper::compiler_barrier(all);
#pragma unroll
    for (int vector = begin; vector < begin + kAtOnce; ++vector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const void* at = from[half] + vector * kSpan<T>;
        if (!kWhole && vector >= all) at = &wide_zeros;
        messages[vector][half] = hopper::load_relaxed_2_halves(at);
      }
    }
  }

  // The first word of each message tells whether it has been sent.
  __device__ __forceinline__ bool is_missing_of(int begin) const {
    uint32_t most = 0;
#pragma unroll
    for (int vector = begin; vector < begin + kAtOnce; ++vector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4& words = messages[vector][half];
        most = max(most, max(words.x, words.z));
        if constexpr (Shape::kOwn == 2) most = max(most, max(words.y, words.w));
      }
    }
    return most == 0xffffffff;
  }

  // Descriptors differ in their lower halves only.
  __device__ __forceinline__ uint64_t weights_at(int offset) const {
    return hopper::tile_descriptor<false>(0) >> 32 << 32 |
           (weights + static_cast<uint32_t>(offset >> 4));
  }

  // Multiplies all terms, whose first loads are in flight. If they are messages, they may not have
  // been sent yet. prepare(index of the first one) is called before each kAtOnce vectors are
  // multiplied.
  template <typename Sums, typename Prepare>
  __device__ __forceinline__ void multiply(Sums& sums, bool are_messages, const Prepare& prepare) {
    constexpr int kNext = static_cast<int>(hopper::kNextInner<false>) << 4;
#pragma unroll
    for (int begin = 0; begin < kVectors; begin += kAtOnce) {
      while (__any_sync(kAllLanes, are_messages && is_missing_of(begin))) load(begin);
      if constexpr (kFrees) hopper::wait_for_products<0>();
      if (begin + kAtOnce < kVectors) load(begin + kAtOnce);
      prepare(begin);
      // There are not enough registers for all descriptors at once either.
      hopper::compiler_barrier(weights);
      hopper::begin_products();
#pragma unroll
      for (int vector = begin; vector < begin + kAtOnce; ++vector) {
        const uint4 &upper = messages[vector][0], &lower = messages[vector][1];
        const int at = vector / 2 * kPart + vector % 2 * (kWideRow / 2);
        hopper::warpgroup_multiply_add<T>(sums, {upper.x, lower.x, upper.y, lower.y},
                                          weights_at(at));
        hopper::warpgroup_multiply_add<T>(sums, {upper.z, lower.z, upper.w, lower.w},
                                          weights_at(at + kNext));
      }
      hopper::commit_products();
    }
    hopper::wait_for_products<0>();
  }
  template <typename Sums>
  __device__ __forceinline__ void multiply(Sums& sums, bool are_messages) {
    multiply(sums, are_messages, [](int) {});
  }

  int first, vectors;
  uint32_t weights;
  const T* from[2];
  uint4 messages[kVectors][2];
};

// All that a block does. `load` brings its part of W_h, and what belongs to it, into shared memory;
// `Rows` computes some rows of the batch.
template <typename Shape, typename Rows, typename Params, typename Load>
__device__ __forceinline__ void run_block(const Params& params, char* shared, const Load& load) {
  constexpr int kRowsAtOnce = Shape::kRowsAtOnce;
  const int blocks = Shape::blocks(params.hidden), batch = static_cast<int>(params.batch);
  const int first_column = blockIdx.x % blocks * Shape::kColumns;
  load(first_column);
  hopper::fence_for_bulk_copies();
  __syncthreads();
  Rows rows(params, first_column, shared);
  rows.release_other();
  const int row_groups = gridDim.x / blocks;
  for (int first = blockIdx.x / blocks * kRowsAtOnce; first < batch;
       first += row_groups * kRowsAtOnce) {
    rows.run(first);
  }
  rows.wait_for_place();
}

}  // namespace
}  // namespace tch_extension::recurrent::wide_grid
