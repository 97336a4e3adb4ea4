// Attention of the newest token of each row by tensor cores, for half kinds: 16 tokens by up to 8
// heads of queries at a time. Floor: the bytes of the keys and values that are in use.
//
// A warp has every so many tiles of 16 tokens. Its lanes read 16 bytes of a key and of a value
// each, as in gemm/skinny_tensor.cu: the order of the values of a head does not matter to a score,
// and that of the output is undone when it is written. Scores are [tokens, heads], softmax' weights
// and values are transposed in registers, and their product is [values, heads]. A running softmax
// needs no other pass.
#include "../hopper/convert.h"
#include "../hopper/memory.h"
#include "../hopper/mma.h"
#include "decode.h"

namespace tch_extension::attention {
namespace {

constexpr int kTile = 16;
// The rows or columns of the matrices that tensor cores read: half of a tile.
constexpr int kHalf = 8;
// Values that L2 fetches at a time, and those that four lanes read.
constexpr int kOfLine = 64, kOfBlock = 32;

// The 8×8 matrix of which each lane has two adjacent values of a row, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result = 0;
#if __CUDA_ARCH__ >= 750
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
#endif
  return result;
}

__device__ __forceinline__ uint32_t word_of(const uint4& words, int which) {
  return which == 0 ? words.x : which == 1 ? words.y : which == 2 ? words.z : words.w;
}

// The largest, or the sum, of the eight lanes that have the same columns of a matrix.
__device__ __forceinline__ float most_of_column(float value) {
#pragma unroll
  for (int step = 4; step < kWarp; step *= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}

__device__ __forceinline__ float sum_of_column(float value) {
#pragma unroll
  for (int step = 4; step < kWarp; step *= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

template <typename T, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 2 ? 2 : 1)
    decode_tensor_kernel(const __grid_constant__ AttentionDecode params) {
#if __CUDA_ARCH__ >= 800
  constexpr int kDim = kBlocks * kOfBlock, kLanes = kHalf;
  extern __shared__ float parts[];  // [kWarps, per_chunk, D + 2]
  hopper::allow_next_kernel();
  const Unit unit = this_unit(params);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int row = lane / 4, column = lane % 4, at = column * kLanes;
  const int64_t of_cache = (unit.row * params.kv_heads + unit.kv) * params.length * kDim + at;
  T* const keys = static_cast<T*>(params.keys) + of_cache;
  T* const values = static_cast<T*>(params.values) + of_cache;
  const int64_t first = warp * static_cast<int64_t>(gridDim.x) + blockIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;

  // Until the previous kernel has ended, the place may be an older one, and the cache may be
  // written. L2 is asked for the tile that will probably be read first. If it were asked for all,
  // it would fetch for this kernel what others wait for.
  if (column * kOfLine < kDim) {
    const int64_t likely = tokens_of(params, hopper::load_relaxed(params.places + unit.row));
    const int line = column * (kOfLine - kLanes);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = first * kTile + half * kHalf + row;
      if (token >= likely) break;
      hopper::prefetch(keys + token * kDim + line);
      hopper::prefetch(values + token * kDim + line);
    }
  }
  hopper::wait_for_previous_kernel();

  const int64_t place = params.places[unit.row], count = tokens_of(params, place);
  uint4 query[kBlocks];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    query[block] = uint4{0, 0, 0, 0};
    if (row >= unit.heads) continue;
    const int64_t begin =
        unit.row * params.query_strides[0] + (unit.first_head + row) * params.query_strides[1];
    const auto loaded = load_rotated<T, kLanes>(params, params.query, begin, at + block * kOfBlock);
    query[block] = reinterpret_cast<const uint4&>(loaded);
  }

  // The new token's, in the lanes that will need it.
  uint4 new_key[kBlocks], new_value[kBlocks];
  const bool is_mine = count > 0 && place / kTile % step == first && place % kHalf == row;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    new_key[block] = new_value[block] = uint4{0, 0, 0, 0};
    if (!is_mine) continue;
    const int64_t key = unit.row * params.key_strides[0] + unit.kv * params.key_strides[1];
    const int64_t value = unit.row * params.value_strides[0] + unit.kv * params.value_strides[1];
    const int there = at + block * kOfBlock;
    const auto rotated = load_rotated<T, kLanes>(params, params.key, key, there);
    const auto loaded = load_vector<T, kLanes>(params.value, value + there);
    new_key[block] = reinterpret_cast<const uint4&>(rotated);
    new_value[block] = reinterpret_cast<const uint4&>(loaded);
    if (!unit.writes) continue;
    *reinterpret_cast<uint4*>(keys + place * kDim + block * kOfBlock) = new_key[block];
    *reinterpret_cast<uint4*>(values + place * kDim + block * kOfBlock) = new_value[block];
  }

  float most[2] = {kNone, kNone}, total[2] = {}, sums[kBlocks][2][4] = {};
  for (int64_t tile = first * kTile; tile < count; tile += step * kTile) {
    uint4 key[2][kBlocks], value[2][kBlocks];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = tile + half * kHalf + row;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int64_t from = token * kDim + block * kOfBlock;
        const bool is_cached = token < count && token != place;
        key[half][block] = token == place ? new_key[block] : uint4{0, 0, 0, 0};
        value[half][block] = token == place ? new_value[block] : uint4{0, 0, 0, 0};
        if (is_cached) key[half][block] = *reinterpret_cast<const uint4*>(keys + from);
        if (is_cached) value[half][block] = *reinterpret_cast<const uint4*>(values + from);
      }
    }
    // [tokens, heads]: those of `row` and of `row` + 8, and heads 2 column and 2 column + 1.
    float scores[4] = {};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 &above = key[0][block], &below = key[1][block], &q = query[block];
      const uint32_t left[4] = {above.x, below.x, above.y, below.y};
      hopper::warp_multiply_add<T>(scores, left, q.x, q.y);
      const uint32_t right[4] = {above.z, below.z, above.w, below.w};
      hopper::warp_multiply_add<T>(scores, right, q.z, q.w);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      scores[e] = tile + e / 2 * kHalf + row < count ? scores[e] * params.scale : kNone;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float larger = fmaxf(most[head], most_of_column(fmaxf(scores[head], scores[head + 2])));
      const float before = share(most[head], larger);
      most[head] = larger;
      scores[head] = share(scores[head], larger);
      scores[head + 2] = share(scores[head + 2], larger);
      total[head] = total[head] * before + scores[head] + scores[head + 2];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int e = head; e < 4; e += 2) {
          sums[block][0][e] *= before;
          sums[block][1][e] *= before;
        }
      }
    }
    const uint32_t weights[2] = {transposed(hopper::rounded<T>({scores[0], scores[1]})),
                                 transposed(hopper::rounded<T>({scores[2], scores[3]}))};
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const uint4 &above = value[0][block], &below = value[1][block];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const uint32_t rows[4] = {
            transposed(word_of(above, 2 * pair)), transposed(word_of(above, 2 * pair + 1)),
            transposed(word_of(below, 2 * pair)), transposed(word_of(below, 2 * pair + 1))};
        hopper::warp_multiply_add<T>(sums[block][pair], rows, weights[0], weights[1]);
      }
    }
  }

  const int size = kDim + 2;
  total[0] = sum_of_column(total[0]);
  total[1] = sum_of_column(total[1]);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int head = 2 * column + e % 2;
    if (head >= unit.heads) continue;
    float* part = parts + (warp * static_cast<int>(params.per_chunk) + head) * size;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        // Word 2 pair + e / 2 of the lane that has column `row` / 2, and its value `row` % 2.
        const int word = 2 * pair + e / 2;
        part[block * kOfBlock + row / 2 * kLanes + 2 * word + row % 2] = sums[block][pair][e];
      }
    }
    if (row == 0 && e < 2) part[kDim] = most[e];
    if (row == 0 && e < 2) part[kDim + 1] = total[e];
  }
  __syncthreads();
  finish<T>(params, unit, parts);
#endif
}

}  // namespace

bool is_for_tensor_cores(const AttentionDecode& params) {
  // Code that the driver compiles from an older architecture's PTX is empty.
  static hopper::CodeFor<8> code;
  const bool is_known = params.head_dim == 64 || params.head_dim == 96 || params.head_dim == 128;
  bool is_half = false;
  for_kind(params.kind, [&](auto type) { is_half = sizeof(typename decltype(type)::type) == 2; });
  return is_known && is_half &&
         code.is_there(reinterpret_cast<const void*>(decode_tensor_kernel<__half, 2>));
}

void start_tensor(const AttentionDecode& params, cudaStream_t stream) {
  for_kind(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      switch (params.head_dim) {
        case 64:
          return start(decode_tensor_kernel<T, 2>, params, stream);
        case 96:
          return start(decode_tensor_kernel<T, 3>, params, stream);
        default:
          return start(decode_tensor_kernel<T, 4>, params, stream);
      }
    }
  });
}

}  // namespace tch_extension::attention
