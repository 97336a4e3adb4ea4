// How a block of the grid works: some warps (producers) multiply messages with weights that stay on
// the chip, and the other threads (finishers) make new messages of the sums.
#pragma once

#include "messages.h"

namespace tch_extension::recurrent::grid {
namespace {

// One step of one sub-batch. A block works through the sub-batches of a step, and then through
// those of the next step.
struct Iteration {
  int step, sub;
  __device__ __forceinline__ void advance(int subs) {
    if (++sub == subs) {
      sub = 0;
      ++step;
    }
  }
};

// What a block computes: adjacent columns of h for its group's rows of the batch.
template <int kColumns>
struct Place {
  template <typename Params>
  explicit __device__ __forceinline__ Place(const Params& params)
      : steps(static_cast<int>(params.steps)),
        batch(static_cast<int>(params.batch)),
        hidden(static_cast<int>(params.hidden)),
        row_step(params.row_groups * kRows) {
    const int blocks = gridDim.x / params.row_groups;
    const int group = blockIdx.x / blocks;
    rows_before = group * kRows;
    first_column = blockIdx.x % blocks * kColumns;
    subs = ((batch + kRows - 1) / kRows - group + params.row_groups - 1) / params.row_groups;
  }
  __device__ __forceinline__ int first_row(int sub) const { return rows_before + sub * row_step; }

  int steps, batch, hidden, row_step, rows_before, first_column, subs;
};

// The source of a lane's messages in an iteration.
template <typename T>
struct Source {
  const T* from;
  int terms;  // from there to the row's end; none where nothing is sent
};

// A double is a message by itself, so both of its words have to arrive together.
template <typename T>
__device__ __forceinline__ uint4 load_message_of(const T* from) {
  return sizeof(T) == 8 ? hopper::load_relaxed_2_halves(from) : hopper::load_relaxed_4_words(from);
}

template <typename T>
__device__ __forceinline__ bool is_unsent_of(const uint4& words) {
  return sizeof(T) == 8 ? max(words.y, words.w) == kUnsent : is_unsent(words);
}

// A lane's messages in an iteration: kVectors vectors of 16 bytes. kRing of them are in flight or
// have arrived, and kGroup are waited for at once.
template <typename Type, int kVectorCount, int kInFlight, int kAtOnce>
struct Messages {
  using T = Type;
  enum : int {
    kVectors = kVectorCount,
    kRing = kInFlight,
    kGroup = kAtOnce,
    kStride = kWarps * kSpan<T>,  // distance from one vector of a warp to its next
  };
  static_assert(kVectors % kRing == 0 && kRing % kGroup == 0, "messages have their places");

  // The first term of the lane's vectors.
  static __device__ __forceinline__ int first_term() {
    return threadIdx.x / kWarp * kSpan<T> + threadIdx.x % 4 * kLanesOf16Bytes<T>;
  }

  __device__ __forceinline__ void load(const Source<T>& source, int vector) {
    messages[vector % kRing] = vector * kStride < source.terms
                                   ? load_message_of<T>(source.from + vector * kStride)
                                   : uint4{};
  }

  // Starts the loads of the first messages of an iteration.
  __device__ __forceinline__ void begin(const Source<T>& source) {
#pragma unroll
    for (int vector = 0; vector < kRing; ++vector) load(source, vector);
  }

  __device__ __forceinline__ bool is_missing(int first) const {
    bool missing = false;
#pragma unroll
    for (int vector = first; vector < first + kGroup; ++vector) {
      missing |= is_unsent_of<T>(messages[vector % kRing]);
    }
    return __any_sync(kAllLanes, missing);
  }

  // Waits until a group has arrived. Later messages of this iteration that are in flight and
  // missing are loaded again, too.
  __device__ __forceinline__ void wait(const Source<T>& source, int first) {
    while (is_missing(first)) {
#pragma unroll
      for (int vector = first; vector < first + kRing && vector < kVectors; ++vector) {
        if (is_unsent_of<T>(messages[vector % kRing])) load(source, vector);
      }
    }
  }

  // Multiplies the messages of the iteration whose first loads are in flight. Meanwhile it loads
  // those of `next`, if `ahead`. A source that is a plain tensor instead of messages may have any
  // bits. Returns whether the first loads of `next` are in flight.
  template <typename Multiply>
  __device__ __forceinline__ bool multiply_each(const Source<T>& here, const Source<T>& next,
                                                bool are_messages, bool ahead,
                                                const Multiply& multiply) {
#pragma unroll
    for (int first = 0; first < kVectors; first += kGroup) {
      if (are_messages) wait(here, first);
#pragma unroll
      for (int vector = first; vector < first + kGroup; ++vector) multiply(vector);
#pragma unroll
      for (int vector = first + kRing; vector < first + kRing + kGroup; ++vector) {
        if (vector < kVectors) {
          load(here, vector);
        } else if (ahead) {
          load(next, vector - kVectors);
        }
      }
    }
    return ahead;
  }

  uint4 messages[kRing];
};

// The product of a block's weights with the messages of an iteration, for kTiles tiles of 16
// results. Each warp has some of the terms: kVectors times 16 bytes per lane, each for two
// instructions. Vectors are assigned to the warps in rotation. Weights are in registers, except for
// the last kShared fragments, for which there is no room; these are in shared memory, [warp,
// fragment, lane].
template <typename Type, int kTileCount, int kVectorCount, int kInShared, int kInFlight,
          int kAtOnce>
struct HalfProduct : Messages<Type, kVectorCount, kInFlight, kAtOnce> {
  using T = Type;
  using Sum = float;
  using Base = Messages<Type, kVectorCount, kInFlight, kAtOnce>;
  using Base::kRing, Base::kVectors, Base::messages;
  enum : int {
    kIsPlain = false,
    kTiles = kTileCount,
    kShared = kInShared,
    kFragments = kVectors * 2 * kTiles,
    kInRegisters = kFragments - kShared,
    kBytesOfWeights = kWarps * kShared * kWarp * 16,
    // Sizes of partial sums, [warp, tile, quad] of four values.
    kBytesOfTile = kWarp * 16,
    kBytesOfWarp = kTiles * kBytesOfTile,
    kBytesOfIteration = kWarps * kBytesOfWarp,
    // Bytes of two columns and half of the rows.
    kBytesOfPair = kBytesOfTile / (kTile / 2),
    // How many sums of a tile are accumulated independently: in a single chain each instruction
    // would wait for the one before.
    kChains = kTiles >= 4   ? 1
              : kTiles == 1 ? 4
                            : 2,
  };

  explicit __device__ __forceinline__ HalfProduct(unsigned char* memory) {
    shared = reinterpret_cast<uint4*>(memory) + threadIdx.x / kWarp * (kShared * kWarp) +
             threadIdx.x % kWarp;
  }

  // Stores a word of the weights for the first or second instruction of a vector and for one tile.
  __device__ __forceinline__ void put_weight(int vector, int half, int tile, int part,
                                             uint32_t word) {
    const int fragment = (vector * 2 + half) * kTiles + tile;
    if (fragment < kInRegisters) {
      weights[fragment][part] = word;
    } else {
      reinterpret_cast<uint32_t*>(shared + (fragment - kInRegisters) * kWarp)[part] = word;
    }
  }

  __device__ __forceinline__ void begin_sums() {
#pragma unroll
    for (auto& chain : sums) {
      for (auto& tile : chain) {
        for (float& sum : tile) sum = 0;
      }
    }
  }

  // Like Messages::multiply_each.
  __device__ __forceinline__ bool multiply(const Source<T>& here, const Source<T>& next,
                                           bool are_messages, bool ahead) {
    begin_sums();
    return Base::multiply_each(here, next, are_messages, ahead,
                               [&](int vector) { multiply_vector(vector); });
  }

  __device__ __forceinline__ void multiply_vector(int vector) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        multiply_one(sums[(vector * 2 + half) % kChains][tile], vector, half, tile);
      }
    }
  }

  __device__ __forceinline__ void multiply_one(float (&sum)[4], int vector, int half, int tile) {
    const uint4& words = messages[vector % kRing];
    const int fragment = (vector * 2 + half) * kTiles + tile;
    const uint32_t b0 = half == 0 ? words.x : words.z, b1 = half == 0 ? words.y : words.w;
    if (fragment < kInRegisters) {
      hopper::warp_multiply_add<T>(sum, weights[fragment], b0, b1);
    } else {
      const uint4 a = shared[(fragment - kInRegisters) * kWarp];
      const uint32_t parts[4] = {a.x, a.y, a.z, a.w};
      hopper::warp_multiply_add<T>(sum, parts, b0, b1);
    }
  }

  // A lane's four sums of a tile belong to two rows of the batch and two adjacent columns, if the
  // rows of the tile of weights are ordered with its even columns first.
  __device__ __forceinline__ void write(unsigned char* partials) const {
    const int lane = threadIdx.x % kWarp, high = lane % 4 / 2;
    unsigned char* to = partials + threadIdx.x / kWarp * kBytesOfWarp +
                        (high * 16 + ((lane / 4 * 2 + lane % 2) ^ (high * 4))) * 16;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sum[4];
#pragma unroll
      for (int of = 0; of < 4; ++of) {
        sum[of] = sums[0][tile][of];
#pragma unroll
        for (int chain = 1; chain < kChains; ++chain) sum[of] += sums[chain][tile][of];
      }
      *reinterpret_cast<float4*>(to + tile * kBytesOfTile) =
          make_float4(sum[0], sum[2], sum[1], sum[3]);
    }
  }

  // Byte offset of a warp's sums of two adjacent columns of a row.
  static __device__ __forceinline__ int place_of(int pair, int row) {
    const int high = row / 4, of_tile = pair % (kTile / 2) * 2 + row / 2 % 2;
    return pair / (kTile / 2) * kBytesOfTile + (high * 16 + (of_tile ^ (high * 4))) * 16 +
           row % 2 * 8;
  }

  uint32_t weights[kInRegisters][4];
  uint4* shared;
  float sums[kChains][kTiles][4];
};

// How producers and finishers synchronize, with partial sums in two buffers.
template <typename Product, int kColumns>
struct TeamsOf {
  static constexpr int kMostTeams = 4;
  enum : int {
    kMembers =
        kColumns < 8 ? kWarp : kColumns / 2 * kRows,  // of a team, each with two columns of a row
    kTeams = kFinishers / kMembers > kMostTeams ? kMostTeams : kFinishers / kMembers,
    kMeeting = kProducers + kMembers,
    kWeights = 2 * Product::kBytesOfIteration,
    kEnd = kWeights + Product::kBytesOfWeights,
    kFull = 1,
    kFree = kFull + 2 * kTeams,
  };
  // Numbers of the named barriers. A team may be one iteration ahead of another.
  static __device__ __forceinline__ int full(int buffer, int team) {
    return kFull + buffer * kTeams + team;
  }
  static __device__ __forceinline__ int free(int buffer) { return kFree + buffer; }
};

// Multiplies `iterations` iterations, beginning with `iteration`; their sources are
// source_of(iteration).
template <typename Product, int kColumns, typename SourceOf>
__device__ __forceinline__ void multiply_iterations(Product& product, const Place<kColumns>& place,
                                                    const SourceOf& source_of, Iteration iteration,
                                                    int iterations, bool ahead,
                                                    unsigned char* memory) {
  using Teams = TeamsOf<Product, kColumns>;
  auto here = source_of(iteration);
  product.begin(here);
  for (int done = 0; done < iterations; ++done) {
    const Iteration now = iteration;
    iteration.advance(place.subs);
    const auto next = source_of(iteration);
    const bool has_begun = product.multiply(here, next, now.step > 0, ahead);
    const int buffer = done % 2;
    if (done > 1) hopper::named_barrier_sync(Teams::free(buffer), Teams::kMeeting);
    product.write(memory + buffer * Product::kBytesOfIteration);
    hopper::named_barrier_arrive(Teams::full(buffer, now.sub % Teams::kTeams), Teams::kMeeting);
    here = next;
    if (!has_begun) product.begin(here);
  }
}

// One finisher: which sub-batches it has, which two columns of which row, and where their partial
// sums are. The assignment avoids bank conflicts both when the sums are written and when they are
// read.
template <typename Product, int kColumns>
struct Member {
  using Teams = TeamsOf<Product, kColumns>;
  using Pair = PairOf<typename Product::Sum>;
  // How many pairs of columns of one row adjacent lanes have; the lanes after them have another
  // row.
  static constexpr int kPairs = kColumns < kTile ? kColumns / 2 : kTile / 2;

  __device__ __forceinline__ Member(const Place<kColumns>& of_block, const unsigned char* partials)
      : place(of_block), index(threadIdx.x - kProducers), team(index / Teams::kMembers) {
    const int member = index % Teams::kMembers, upper = member / (4 * kPairs) % 2;
    const int pair = member / (kRows * kPairs) * kPairs + member / 4 % kPairs;
    row = upper * 4 + member % 4;
    has_columns = 2 * pair < kColumns;
    column = place.first_column + 2 * pair;
    found = partials + Product::place_of(has_columns ? pair : 0, row);
  }

  __device__ __forceinline__ bool is_valid(int sub) const {
    return has_columns && place.first_row(sub) + row < place.batch && column < place.hidden;
  }
  // The index in [B, H] of this finisher's first column.
  __device__ __forceinline__ uint32_t at_first(int sub) const {
    return static_cast<uint32_t>(place.first_row(sub) + row) * place.hidden + column;
  }
  // Whether this lane has the first of a row's columns: such a lane prefetches for all of them.
  __device__ __forceinline__ bool is_first() const {
    // With 3 pairs, the size of a team is not a multiple of the number of pairs.
    const int member = kPairs == 3 ? index % Teams::kMembers : index;
    return member / 4 % kPairs == 0;
  }

  // The first iteration of this thread's team; threads beyond the last team have none.
  __device__ __forceinline__ Iteration first_iteration() const {
    return {0, team < Teams::kTeams ? team : place.subs};
  }
  __device__ __forceinline__ void advance(Iteration& iteration) const {
    iteration.sub += Teams::kTeams;
    if (iteration.sub >= place.subs) iteration = {iteration.step + 1, team};
  }

  // Reads the sums of an iteration, which is number `done` of the `iterations` that are multiplied.
  template <int kSums>
  __device__ __forceinline__ void take(Pair (&sums)[kSums], int done, int iterations) const {
    const int buffer = done % 2;
    hopper::named_barrier_sync(Teams::full(buffer, team), Teams::kMeeting);
#pragma unroll
    for (int sum = 0; sum < kSums; ++sum) {
      sums[sum] = sum_of_parts(found + buffer * Product::kBytesOfIteration +
                               sum * (kColumns / 2 * Product::kBytesOfPair));
    }
    if (done + 2 < iterations) hopper::named_barrier_arrive(Teams::free(buffer), Teams::kMeeting);
  }

  static __device__ __forceinline__ Pair sum_of_parts(const unsigned char* at) {
    Pair parts[kWarps];
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      parts[warp] = *reinterpret_cast<const Pair*>(at + warp * Product::kBytesOfWarp);
    }
#pragma unroll
    for (int apart = 1; apart < kWarps; apart *= 2) {
#pragma unroll
      for (int warp = 0; warp < kWarps; warp += 2 * apart) {
        parts[warp].x += parts[warp + apart].x;
        parts[warp].y += parts[warp + apart].y;
      }
    }
    return parts[0];
  }

  const Place<kColumns>& place;
  const int index, team;
  int row, column;
  bool has_columns;
  const unsigned char* found;
};

}  // namespace
}  // namespace tch_extension::recurrent::grid
