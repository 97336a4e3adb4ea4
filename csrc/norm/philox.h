// Dropout by the random numbers of libtorch's generator. Whether a value is kept depends on the
// generator's state and on the value's place in the array alone, so that the backward pass finds it
// again, with other threads.
#pragma once

#include "params.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension::norm {
namespace {

// The generator's state: its values, or where they are.
struct RandomState {
  uint64_t seed, offset;

  __device__ __forceinline__ explicit RandomState(const NormRandom& random)
      : seed(random.seed), offset(random.offset) {
    if (random.seed_at != nullptr) {
      seed = static_cast<uint64_t>(*random.seed_at);
      offset += static_cast<uint64_t>(*random.offset_at);
    }
  }
};

// Philox4x32-10 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3. `sequence` and
// `offset` count as those of curand do.
__device__ __forceinline__ uint4 philox(const RandomState& state, uint64_t sequence) {
  const uint64_t step = state.offset / 4;
  uint4 counter =
      make_uint4(static_cast<unsigned int>(step), static_cast<unsigned int>(step >> 32),
                 static_cast<unsigned int>(sequence), static_cast<unsigned int>(sequence >> 32));
  unsigned int key_low = static_cast<unsigned int>(state.seed);
  unsigned int key_high = static_cast<unsigned int>(state.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const unsigned int low = 0xd2511f53u * counter.x, high = __umulhi(0xd2511f53u, counter.x);
    const unsigned int other_low = 0xcd9e8d57u * counter.z;
    const unsigned int other_high = __umulhi(0xcd9e8d57u, counter.z);
    counter =
        make_uint4(other_high ^ counter.y ^ key_low, other_low, high ^ counter.w ^ key_high, low);
    key_low += 0x9e3779b9u;
    key_high += 0xbb67ae85u;
  }
  return counter;
}

// Sets values to zero with the given probability p, and multiplies the others by 1 / (1 - p). A
// value takes 16 random bits, so that p is rounded to a multiple of 2⁻¹⁶, for the scale, too. Eight
// adjacent values share a number of 128 bits.
template <typename C>
struct Dropout {
  RandomState state;
  unsigned int dropped;  // of 2¹⁶ numbers
  C scale;

  __device__ __forceinline__ Dropout(const NormRandom& random, double probability)
      : state(random),
        dropped(static_cast<unsigned int>(probability * 65536.0 + 0.5)),
        scale(static_cast<C>(65536.0 / (65536 - static_cast<int>(dropped)))) {}

  // `at` is the first value's place in the array: a multiple of kLanes.
  template <typename T, int kLanes>
  __device__ __forceinline__ void apply(Values<T, kLanes>& values, int64_t at) const {
    static_assert(kLanes == 2 || kLanes == 4 || kLanes == 8, "lanes share one number");
    const uint4 four = philox(state, static_cast<uint64_t>(at) / 8);
    unsigned int words[kLanes / 2];
    if constexpr (kLanes == 8) {
      words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if constexpr (kLanes == 4) {
      const bool is_second = at & 4;
      words[0] = is_second ? four.z : four.x, words[1] = is_second ? four.w : four.y;
    } else {
      words[0] = at & 4 ? (at & 2 ? four.w : four.z) : (at & 2 ? four.y : four.x);
    }
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      const unsigned int bits = words[lane / 2] >> (lane % 2 * 16) & 0xffffu;
      values.lane[lane] = bits < dropped ? C(0) : values.lane[lane] * scale;
    }
  }
};

// Keeps the state for the backward pass.
__device__ __forceinline__ void keep_state(const NormRandom& random, int64_t* kept) {
  const RandomState state(random);
  kept[0] = static_cast<int64_t>(state.seed);
  kept[1] = static_cast<int64_t>(state.offset);
}

}  // namespace
}  // namespace tch_extension::norm
