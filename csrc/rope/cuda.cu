// A thread block has some tokens. Its threads differ in the token (z), in the heads (y) and in the
// unit (x): two vectors of a head, the same ones of all heads of q and k. A thread keeps the
// cosines and sines of its unit in registers, and loads both vectors of several heads before it
// uses the first, so that enough bytes are in flight. Nothing is divided. A vector has 16 bytes
// where addresses, strides and sizes allow it; otherwise 4 bytes of a half kind, or one value.
#include "../hopper/dependent_launch.h"
#include "rope.h"
#include "tch_extension/cuda_vector.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::rope {
namespace {

// The heads whose vectors a thread has in flight.
constexpr int kHeads = 2;

// The two vectors of a unit, as places in a head. They are the same one at the end of an odd number
// of vectors that are copied.
struct Unit {
  int64_t first;
  int64_t second;
  bool is_rotated;  // otherwise copied
};

// Units first cover the values that are rotated. If pairs are interleaved, a vector of several
// values has whole pairs, and the second one is as far away as if they were not.
template <int kLanes, bool kInterleaved>
__device__ __forceinline__ Unit unit_at(const RopeRotation& params, int64_t index) {
  const int64_t rotated = params.rotated / (2 * kLanes);
  if (index < rotated) {
    if (kInterleaved && kLanes == 1) return {2 * index, 2 * index + 1, true};
    return {index * kLanes, params.rotated / 2 + index * kLanes, true};
  }
  const int64_t copied = (index - rotated) * (2 * kLanes);
  const int64_t first = params.rotated + copied;
  return {first, copied + kLanes < params.copied ? first + kLanes : first, false};
}

template <typename C, int kLanes>
struct Angles {
  C cos[kLanes];
  C sin[kLanes];
};

// Loads kCount adjacent values of a table, from an address that is a multiple of their size or of
// 16 bytes.
template <typename W, int kCount, typename C>
__device__ __forceinline__ void load_angles(const W* from, C* to) {
  constexpr int kAtOnce = kCount < kLanesOf16Bytes<W> ? kCount : kLanesOf16Bytes<W>;
#pragma unroll
  for (int at = 0; at < kCount; at += kAtOnce) {
    const auto values = load_vector<W, kAtOnce>(from, at);
#pragma unroll
    for (int lane = 0; lane < kAtOnce; ++lane) to[at + lane] = static_cast<C>(values.lane[lane]);
  }
}

// The angles of a unit that is rotated: for each lane of its first vector or, if a vector has whole
// pairs, those of the first vector's pairs and then those of the second's.
template <typename C, typename W, int kLanes, bool kInterleaved>
__device__ __forceinline__ Angles<C, kLanes> angles_of(const RopeRotation& params, int64_t token,
                                                       int64_t index) {
  const W* cos = static_cast<const W*>(params.cos) + token * params.cos_stride;
  const W* sin = static_cast<const W*>(params.sin) + token * params.sin_stride;
  Angles<C, kLanes> angles;
  if constexpr (kInterleaved && kLanes > 1) {
    constexpr int kPairs = kLanes / 2;
    const int64_t first = index * kPairs, second = params.rotated / 4 + first;
    load_angles<W, kPairs>(cos + first, angles.cos);
    load_angles<W, kPairs>(cos + second, angles.cos + kPairs);
    load_angles<W, kPairs>(sin + first, angles.sin);
    load_angles<W, kPairs>(sin + second, angles.sin + kPairs);
  } else {
    load_angles<W, kLanes>(cos + index * kLanes, angles.cos);
    load_angles<W, kLanes>(sin + index * kLanes, angles.sin);
  }
  if (params.is_inverse) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) angles.sin[lane] = -angles.sin[lane];
  }
  return angles;
}

// The steps are written out so that each kernel rounds alike, whatever its vectors.
template <typename C>
__device__ __forceinline__ void rotate_pair(C& a, C& b, C cos, C sin) {
  const C before = a;
  a = fma(before, cos, -(b * sin));
  b = fma(b, cos, before * sin);
}

template <typename T, int kLanes>
__device__ __forceinline__ Vector<T, kLanes> rounded(const Values<T, kLanes>& values) {
  Vector<T, kLanes> vector;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) vector.lane[lane] = static_cast<T>(values.lane[lane]);
  return vector;
}

template <typename T, int kLanes, bool kInterleaved>
__device__ __forceinline__ void rotate_unit(Vector<T, kLanes>& first, Vector<T, kLanes>& second,
                                            const Angles<Compute<T>, kLanes>& angles) {
  Values<T, kLanes> a = unpack<T, kLanes>(first);
  Values<T, kLanes> b = unpack<T, kLanes>(second);
  if constexpr (kInterleaved && kLanes > 1) {
    constexpr int kPairs = kLanes / 2;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      rotate_pair(a.lane[2 * pair], a.lane[2 * pair + 1], angles.cos[pair], angles.sin[pair]);
      rotate_pair(b.lane[2 * pair], b.lane[2 * pair + 1], angles.cos[kPairs + pair],
                  angles.sin[kPairs + pair]);
    }
  } else {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane)
      rotate_pair(a.lane[lane], b.lane[lane], angles.cos[lane], angles.sin[lane]);
  }
  first = rounded<T, kLanes>(a);
  second = rounded<T, kLanes>(b);
}

// The first vectors of a token's heads in one of the two tensors.
template <typename T>
struct Token {
  const T* from;
  T* to;

  __device__ __forceinline__ Token(const RopeHeads& heads, int64_t batch, int64_t token,
                                   int64_t place) {
    from = static_cast<const T*>(heads.from) + batch * heads.from_strides[0] +
           token * heads.from_strides[1] + place;
    to = static_cast<T*>(heads.to) + batch * heads.to_strides[0] + token * heads.to_strides[1] +
         place;
  }
};

// Rotates or copies the unit in all heads of a token that are this thread's. In place nobody else
// reads or writes these values.
template <typename T, int kLanes, bool kInterleaved>
__device__ __forceinline__ void compute_token(const RopeRotation& params, int64_t batch,
                                              int64_t token, const Unit& unit,
                                              const Angles<Compute<T>, kLanes>& angles) {
  const Token<T> q(params.q, batch, token, unit.first), k(params.k, batch, token, unit.first);
  const int heads_of_q = static_cast<int>(params.q.heads);
  const int heads = heads_of_q + static_cast<int>(params.k.heads);
  const int64_t distance = unit.second - unit.first;
  const int by = static_cast<int>(blockDim.y);
  for (int begin = static_cast<int>(threadIdx.y); begin < heads; begin += kHeads * by) {
    using Word = Vector<T, kLanes>;
    Word first[kHeads], second[kHeads];
#pragma unroll
    for (int index = 0; index < kHeads; ++index) {
      const int head = begin + index * by;
      if (head >= heads) continue;
      const T* from = head < heads_of_q ? q.from + head * params.q.from_strides[2]
                                        : k.from + (head - heads_of_q) * params.k.from_strides[2];
      first[index] = *reinterpret_cast<const Word*>(from);
      second[index] = *reinterpret_cast<const Word*>(from + distance);
    }
#pragma unroll
    for (int index = 0; index < kHeads; ++index) {
      const int head = begin + index * by;
      if (head >= heads) continue;
      if (unit.is_rotated) {
        rotate_unit<T, kLanes, kInterleaved>(first[index], second[index], angles);
      }
      T* to = head < heads_of_q ? q.to + head * params.q.to_strides[2]
                                : k.to + (head - heads_of_q) * params.k.to_strides[2];
      *reinterpret_cast<Word*>(to) = first[index];
      *reinterpret_cast<Word*>(to + distance) = second[index];
    }
  }
}

// The number of units of a head.
template <int kLanes>
__host__ __device__ __forceinline__ int64_t units_of(const RopeRotation& params) {
  return params.rotated / (2 * kLanes) + ceil_div(params.copied, int64_t{2 * kLanes});
}

template <typename T, typename W, int kLanes, bool kInterleaved>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(const __grid_constant__ RopeRotation params) {
  hopper::allow_next_kernel();
  hopper::wait_for_previous_kernel();
  const int64_t units = units_of<kLanes>(params);
  const int64_t by = static_cast<int64_t>(gridDim.x) * blockDim.z;
  int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  for (; token < params.tokens; token += by) {
    for (int64_t index = threadIdx.x; index < units; index += blockDim.x) {
      const Unit unit = unit_at<kLanes, kInterleaved>(params, index);
      Angles<Compute<T>, kLanes> angles = {};
      if (unit.is_rotated) {
        angles = angles_of<Compute<T>, W, kLanes, kInterleaved>(params, token, index);
      }
      for (int64_t batch = blockIdx.y; batch < params.batch; batch += gridDim.y)
        compute_token<T, kLanes, kInterleaved>(params, batch, token, unit, angles);
    }
  }
}

unsigned int at_most(int64_t value, int64_t most) {
  return static_cast<unsigned int>(value < most ? value : most);
}

// The limits of a grid's first and second dimension and of a block's third.
constexpr int64_t kMostInX = INT32_MAX;
constexpr int64_t kMostInY = 65535;
constexpr int64_t kMostInZ = 64;

template <typename T, typename W, int kLanes, bool kInterleaved>
void start_kernel(const RopeRotation& params, cudaStream_t stream) {
  const int64_t units = units_of<kLanes>(params), heads = params.q.heads + params.k.heads;
  if (units == 0 || heads == 0 || params.tokens == 0 || params.batch == 0) return;
  dim3 block;
  block.x = at_most(units, kThreads);
  block.y = at_most(ceil_div(heads, int64_t{kHeads}), kThreads / block.x);
  const unsigned int fit = kThreads / (block.x * block.y);
  block.z = at_most(params.tokens, fit < kMostInZ ? fit : kMostInZ);
  const dim3 grid(at_most(ceil_div(params.tokens, int64_t{block.z}), kMostInX),
                  at_most(params.batch, kMostInY));
  const auto kernel = rotate_kernel<T, W, kLanes, kInterleaved>;
  if (hopper::is_short(grid)) return hopper::launch_early(kernel, grid, block, 0, stream, params);
  kernel<<<grid, block, 0, stream>>>(params);
}

template <typename T, typename W, int kLanes>
void start(const RopeRotation& params, cudaStream_t stream) {
  if (params.is_interleaved) return start_kernel<T, W, kLanes, true>(params, stream);
  start_kernel<T, W, kLanes, false>(params, stream);
}

bool is_multiple(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether all vectors of `lanes` values begin at multiples of their size. The stride of a single
// sequence, token or head is never used.
template <typename T>
bool heads_fit(const RopeRotation& params, const RopeHeads& heads, int64_t lanes) {
  if (heads.heads == 0) return true;
  const int64_t bytes = lanes * static_cast<int64_t>(sizeof(T));
  const int64_t sizes[] = {params.batch, params.tokens, heads.heads};
  for (int dim = 0; dim < 3; ++dim) {
    const bool is_used = sizes[dim] > 1;
    if (is_used && heads.from_strides[dim] % lanes != 0) return false;
    if (is_used && heads.to_strides[dim] % lanes != 0) return false;
  }
  return is_multiple(heads.from, bytes) && is_multiple(heads.to, bytes);
}

template <typename W>
bool table_fits(const RopeRotation& params, const void* table, int64_t stride, int64_t lanes) {
  const int64_t size = sizeof(W), bytes = lanes * size < 16 ? lanes * size : 16;
  return is_multiple(table, bytes) && (params.tokens <= 1 || stride * size % bytes == 0);
}

template <typename T, typename W>
bool fits(const RopeRotation& params, int64_t lanes) {
  return params.rotated % (2 * lanes) == 0 && params.copied % lanes == 0 &&
         heads_fit<T>(params, params.q, lanes) && heads_fit<T>(params, params.k, lanes) &&
         table_fits<W>(params, params.cos, params.cos_stride, lanes) &&
         table_fits<W>(params, params.sin, params.sin_stride, lanes);
}

template <typename T, typename W>
void start_for_kinds(const RopeRotation& params, cudaStream_t stream) {
  if (fits<T, W>(params, kLanesOf16Bytes<T>)) {
    return start<T, W, kLanesOf16Bytes<T>>(params, stream);
  }
  if constexpr (sizeof(T) == 2) {
    if (fits<T, W>(params, 2)) return start<T, W, 2>(params, stream);
  }
  start<T, W, 1>(params, stream);
}

}  // namespace
}  // namespace tch_extension::rope

using namespace tch_extension;

extern "C" LaunchStatus tch_extension_rope_rotate_cuda(const RopeRotation* params,
                                                       cudaStream_t stream) {
  for_kind(params->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if (params->table_kind == params->kind) return rope::start_for_kinds<T, T>(*params, stream);
    rope::start_for_kinds<T, Compute<T>>(*params, stream);
  });
  return launch_status("rope_rotate");
}
