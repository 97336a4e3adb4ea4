// Products with up to 8 rows or columns in half kinds, by tensor cores: many rows of K adjacent
// values, of which each is read once, in 16 bytes. Floor: the bytes of the long factor.
//
// A block computes 16 rows of the long factor; its warps share K. Tensor cores multiply 16×16 by
// 16×8: the short factor has the 8 columns, so that 8 rows of it cost no more than one. The order
// of K within 32 values does not matter to a sum: each lane reads 16 bytes of a row of each factor,
// and both count as the same four parts of two products.
//
// Several products of one short factor share a launch: each block belongs to one of them. With a
// gate, a block computes 8 rows of each of two, and multiplies.
//
// With a norm, the short factor x is multiplied by the norm's weight as it is read, and the sums
// are divided by the root of its mean square, which the same loop adds up: no pass comes before it.
// That rounds as often as a norm of its own does.
//
// The kernel may start before the previous one has ended. Until then it only asks L2 for the long
// factor, which is right even if that kernel writes it: all writes of a GPU meet in L2.
#include "../hopper/dependent_launch.h"
#include "../hopper/memory.h"
#include "../hopper/mma.h"
#include "../hopper/silu.h"
#include "skinny_operands.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension::gemm {
namespace {

constexpr int kTileRows = 16;

// Weights are read once, so they need no place in L1; L2 fetches whole lines, of which two warps
// read half each.
[[maybe_unused]] __device__ __forceinline__ uint4 load_once(const void* address) {
#if __CUDA_ARCH__ >= 800
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
#else
  return *static_cast<const uint4*>(address);
#endif
}

// x g, rounded, of 8 values; adds their x² to `squares`.
template <typename T>
__device__ __forceinline__ uint4 weighted(uint4 x, uint4 g, float& squares) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  auto& lanes = reinterpret_cast<Vector<T, kLanes>&>(x);
  const auto from = unpack<T, kLanes>(lanes);
  const auto by = unpack<T, kLanes>(reinterpret_cast<const Vector<T, kLanes>&>(g));
#pragma unroll
  for (int i = 0; i < kLanes; ++i) {
    squares += from.lane[i] * from.lane[i];
    lanes.lane[i] = static_cast<T>(from.lane[i] * by.lane[i]);
  }
  return x;
}

// The number of tiles of a group, or of one of its products.
__host__ __device__ inline int64_t tiles_of(const Skinny& skinny) {
  return ceil_div(skinny.rows, int64_t{kTileRows});
}

inline int64_t tiles_of(const SkinnyGroup& group) {
  if (group.is_gated) return ceil_div(group.each[0].rows, int64_t{kTileRows / 2});
  int64_t tiles = 0;
  for (int which = 0; which < group.count; ++which) tiles += tiles_of(group.each[which]);
  return tiles;
}

template <typename T, int kWarps, bool kIsNormed>
__global__ void __launch_bounds__(kWarps* kWarp)
    skinny_tensor_kernel(const __grid_constant__ SkinnyGroup group) {
#if __CUDA_ARCH__ >= 800
  // What the lanes of a row read at a time; how many vectors of each of its two rows a lane has in
  // flight, which leaves registers for more blocks; and for how many of them it asks ahead of time,
  // beyond which L2 would fetch for this kernel what the previous one waits for.
  constexpr int kStep = 32, kAhead = 4, kAsked = 2;
  constexpr int kHalf = kTileRows / 2;
  __shared__ float parts[kWarps][kMostShortByTensor][kTileRows];
  [[maybe_unused]] __shared__ float squares_of[kWarps][kMostShortByTensor];
  hopper::allow_next_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int quad = lane / 4, at = lane % 4 * 8;
  // The upper and the lower half of the block's tile: of one product, or of two with a gate.
  int which = 0;
  int64_t tile = blockIdx.x;
  for (; which + 1 < group.count && !group.is_gated; ++which) {
    const int64_t tiles = tiles_of(group.each[which]);
    if (tile < tiles) break;
    tile -= tiles;
  }
  const Skinny& skinny = group.each[which];
  const Skinny& below_of = group.is_gated ? group.each[1] : skinny;
  const int64_t first = tile * (group.is_gated ? kHalf : kTileRows);
  const int64_t first_below = group.is_gated ? first : first + kHalf;
  const auto row_at = [&](const Skinny& of, int64_t row) {
    const int64_t index = row < of.rows ? row : of.rows - 1;
    return of_batch<T>(of.many) + index * of.many.row + at;
  };
  const T* const upper = row_at(skinny, first + quad);
  const T* const lower = row_at(below_of, first_below + quad);
  const int inner = static_cast<int>(skinny.inner);
  constexpr int kBy = kWarps * kStep;
  if (lane % 2 == 0) {
    for (int k = warp * kStep; k + at < inner && k < kAsked * kBy; k += kBy) {
      hopper::prefetch(upper + k);
      hopper::prefetch(lower + k);
    }
  }
  hopper::wait_for_previous_kernel();

  const bool is_there = quad < skinny.shorts;
  const T* const few = of_batch<T>(skinny.few) + (is_there ? quad : 0) * skinny.few.row + at;
  const T* const weight = kIsNormed ? static_cast<const T*>(group.norm_weight) + at : nullptr;
  float sums[4] = {}, squares = 0;
  for (int begin = warp * kStep; begin < inner; begin += kAhead * kBy) {
    uint4 above[kAhead], below[kAhead], other[kAhead], norm[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = begin + i * kBy;
      above[i] = below[i] = other[i] = norm[i] = uint4{0, 0, 0, 0};
      if (k + at >= inner) continue;
      above[i] = load_once(upper + k);
      below[i] = load_once(lower + k);
      if (is_there) other[i] = *reinterpret_cast<const uint4*>(few + k);
      if (kIsNormed && is_there) norm[i] = *reinterpret_cast<const uint4*>(weight + k);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (kIsNormed) other[i] = weighted<T>(other[i], norm[i], squares);
      const uint32_t left[4] = {above[i].x, below[i].x, above[i].y, below[i].y};
      hopper::warp_multiply_add<T>(sums, left, other[i].x, other[i].y);
      const uint32_t right[4] = {above[i].z, below[i].z, above[i].w, below[i].w};
      hopper::warp_multiply_add<T>(sums, right, other[i].z, other[i].w);
    }
  }
  const int s = lane % 4 * 2;
  parts[warp][s][quad] = sums[0];
  parts[warp][s + 1][quad] = sums[1];
  parts[warp][s][quad + kHalf] = sums[2];
  parts[warp][s + 1][quad + kHalf] = sums[3];
  if (kIsNormed) {
    squares += __shfl_xor_sync(kAllLanes, squares, 1);
    squares += __shfl_xor_sync(kAllLanes, squares, 2);
    if (lane % 4 == 0) squares_of[warp][quad] = squares;
  }
  __syncthreads();
  // Whole warps are left, because 8 × 16 outputs are.
  static_assert(kMostShortByTensor * kTileRows % kWarp == 0);
  if (threadIdx.x >= kMostShortByTensor * kTileRows) return;
  const int row = static_cast<int>(threadIdx.x) % kTileRows;
  const int short_row = static_cast<int>(threadIdx.x) / kTileRows;
  float sum = 0;
#pragma unroll
  for (int of = 0; of < kWarps; ++of) sum += parts[of][short_row][row];
  if (kIsNormed) {
    float square = 0;
#pragma unroll
    for (int of = 0; of < kWarps; ++of) square += squares_of[of][short_row];
    sum *= rsqrtf(square / static_cast<float>(inner) + group.norm_eps);
  }
  if (group.is_gated) {
    // Rounded as the products would be that a kernel of its own multiplies.
    const float value = static_cast<float>(static_cast<T>(sum));
    sum = hopper::silu<T>(value).value * __shfl_down_sync(kAllLanes, value, kHalf);
    if (row >= kHalf) return;
  }
  if (short_row >= skinny.shorts || first + row >= skinny.rows) return;
  finish<T>(skinny, first + row, short_row, sum + bias_of<T>(skinny, first + row, short_row));
#endif
}

template <typename T, int kWarps>
void start(const SkinnyGroup& group, int64_t batch, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned int>(tiles_of(group)), 1, static_cast<unsigned int>(batch));
  // In half, x g could overflow before it is divided.
  constexpr bool kCanNorm = std::is_same_v<T, __nv_bfloat16>;
  const auto kernel = kCanNorm && group.norm_weight != nullptr
                          ? skinny_tensor_kernel<T, kWarps, kCanNorm>
                          : skinny_tensor_kernel<T, kWarps, false>;
  hopper::launch_early(kernel, grid, dim3(kWarps * kWarp), 0, stream, group);
}

// Several small blocks for each multiprocessor hide each other's ends. Few blocks have many warps,
// so that enough bytes are in flight.
template <typename T>
void start_for(const SkinnyGroup& group, int64_t batch, cudaStream_t stream) {
  constexpr int64_t kManyTiles = 2 * 132;
  constexpr int64_t kLong = 4096;
  if (tiles_of(group) * batch >= kManyTiles) return start<T, 4>(group, batch, stream);
  if (group.each[0].inner >= kLong) return start<T, 16>(group, batch, stream);
  start<T, 8>(group, batch, stream);
}

// Code that the driver compiles from an older architecture's PTX is empty.
bool has_tensor_cores() {
  static hopper::CodeFor<8> code;
  return code.is_there(reinterpret_cast<const void*>(skinny_tensor_kernel<__half, 4, false>));
}

}  // namespace

bool is_for_tensor_cores(const Skinny& skinny, int32_t kind) {
  // With fewer terms, most of a block's warps would be idle.
  constexpr int64_t kFewest = 256;
  if (skinny.inner < kFewest || skinny.shorts > kMostShortByTensor) return false;
  bool can_read = false;
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) {
      can_read = skinny.many.inner == 1 && skinny.few.inner == 1 &&
                 skinny.inner % kLanesOf16Bytes<T> == 0 &&
                 is_even<T>(skinny.many, skinny.many.row) && is_even<T>(skinny.few, skinny.few.row);
    }
  });
  return can_read && has_tensor_cores();
}

void start_skinny_tensor(const SkinnyGroup& group, int32_t kind, int64_t batch,
                         cudaStream_t stream) {
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) start_for<T>(group, batch, stream);
  });
}

}  // namespace tch_extension::gemm
