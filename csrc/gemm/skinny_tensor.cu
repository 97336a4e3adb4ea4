// Products with up to 8 rows or columns in half kinds, by tensor cores: many rows of K adjacent
// values, of which each is read once, in 16 bytes. Floor: the bytes of the long factor.
//
// A block computes 16 rows of the long factor; its warps share K. Tensor cores multiply 16×16 by
// 16×8: the short factor has the 8 columns, so that 8 rows of it cost no more than one. The order
// of K within 32 values does not matter to a sum: each lane reads 16 bytes of a row of each factor,
// and both count as the same four parts of two products.
//
// The kernel may start before the previous one has ended. Until then it only asks L2 for the long
// factor, which is right even if that kernel writes it: all writes of a GPU meet in L2.
#include "../hopper/dependent_launch.h"
#include "../hopper/mma.h"
#include "skinny_operands.h"

namespace tch_extension::gemm {
namespace {

constexpr int kTileRows = 16;

[[maybe_unused]] __device__ __forceinline__ void prefetch(const void* address) {
#if __CUDA_ARCH__ >= 800
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

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

template <typename T, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp)
    skinny_tensor_kernel(const __grid_constant__ Skinny skinny) {
#if __CUDA_ARCH__ >= 800
  // What the lanes of a row read at a time, and how many vectors of each of its two rows a lane has
  // in flight.
  constexpr int kStep = 32, kAhead = 8;
  __shared__ float parts[kWarps][kMostShortByTensor][kTileRows];
  hopper::allow_next_kernel();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int group = lane / 4, at = lane % 4 * 8;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileRows;
  const auto row_at = [&](int row) {
    const int64_t index = first + row < skinny.rows ? first + row : skinny.rows - 1;
    return of_batch<T>(skinny.many) + index * skinny.many.row + at;
  };
  const T* const upper = row_at(group);
  const T* const lower = row_at(group + 8);
  const int inner = static_cast<int>(skinny.inner);
  constexpr int kBy = kWarps * kStep;
  if (lane % 2 == 0) {
    for (int k = warp * kStep; k + at < inner && k < kAhead * kBy; k += kBy) {
      prefetch(upper + k);
      prefetch(lower + k);
    }
  }
  hopper::wait_for_previous_kernel();

  const bool is_there = group < skinny.shorts;
  const T* const few = of_batch<T>(skinny.few) + (is_there ? group : 0) * skinny.few.row + at;
  float sums[4] = {};
  for (int begin = warp * kStep; begin < inner; begin += kAhead * kBy) {
    uint4 above[kAhead], below[kAhead], other[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = begin + i * kBy;
      above[i] = below[i] = other[i] = uint4{0, 0, 0, 0};
      if (k + at >= inner) continue;
      above[i] = load_once(upper + k);
      below[i] = load_once(lower + k);
      if (is_there) other[i] = *reinterpret_cast<const uint4*>(few + k);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t left[4] = {above[i].x, below[i].x, above[i].y, below[i].y};
      hopper::warp_multiply_add<T>(sums, left, other[i].x, other[i].y);
      const uint32_t right[4] = {above[i].z, below[i].z, above[i].w, below[i].w};
      hopper::warp_multiply_add<T>(sums, right, other[i].z, other[i].w);
    }
  }
  const int s = lane % 4 * 2;
  parts[warp][s][group] = sums[0];
  parts[warp][s + 1][group] = sums[1];
  parts[warp][s][group + 8] = sums[2];
  parts[warp][s + 1][group + 8] = sums[3];
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x) % kTileRows;
  const int short_row = static_cast<int>(threadIdx.x) / kTileRows;
  if (short_row >= skinny.shorts || first + row >= skinny.rows) return;
  float sum = bias_of<T>(skinny, first + row, short_row);
#pragma unroll
  for (int of = 0; of < kWarps; ++of) sum += parts[of][short_row][row];
  finish<T>(skinny, first + row, short_row, sum);
#endif
}

template <typename T, int kWarps>
void start(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned int>(ceil_div(skinny.rows, int64_t{kTileRows})), 1,
                  static_cast<unsigned int>(batch));
  hopper::launch_early(skinny_tensor_kernel<T, kWarps>, grid, dim3(kWarps * kWarp), 0, stream,
                       skinny);
}

// Several small blocks for each multiprocessor hide each other's ends. Few blocks have many warps,
// so that enough bytes are in flight.
template <typename T>
void start_for(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int64_t kManyTiles = 2 * 132;
  constexpr int64_t kLong = 4096;
  if (ceil_div(skinny.rows, int64_t{kTileRows}) * batch >= kManyTiles)
    return start<T, 4>(skinny, batch, stream);
  if (skinny.inner >= kLong) return start<T, 16>(skinny, batch, stream);
  start<T, 8>(skinny, batch, stream);
}

// Code that the driver compiles from an older architecture's PTX is empty.
bool has_tensor_cores() {
  static hopper::CodeFor<8> code;
  return code.is_there(reinterpret_cast<const void*>(skinny_tensor_kernel<__half, 4>));
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

void start_skinny_tensor(const Skinny& skinny, int32_t kind, int64_t batch, cudaStream_t stream) {
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    if constexpr (sizeof(T) == 2) start_for<T>(skinny, batch, stream);
  });
}

}  // namespace tch_extension::gemm
