// What the persistent kernels are made of: waiting for bytes from other blocks of a cluster,
// sending them, and tiles of weights that stay on chip. For code made for sm_90 and newer only.
#pragma once

#include <type_traits>

#include "float_functions.h"
#include "persistent.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension {
namespace {

constexpr int kWarp = 32;
constexpr int kGates = 3;

// Rows of the batch that a cluster computes: as many as the product's instruction has columns.
constexpr int kRows = 8;

// Columns of h that a warp computes
constexpr int kTile = 16;

// Sums of a gate that a lane holds, and warps that finish a tile's columns, each of them one of
// these sums. They share the terms; in some kernels as many others do so, too.
constexpr int kSplits = 4;

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t address, uint32_t block) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Of some warps of the block.
__device__ __forceinline__ void barrier_of(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A barrier that is passed when as many bytes have come as were announced.
__device__ __forceinline__ void init_arrival(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void publish_arrivals() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void announce(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool has_arrived(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// A try waits for a while by itself.
__device__ __forceinline__ void wait_for_arrival(uint32_t barrier, uint32_t parity) {
  while (!has_arrived(barrier, parity)) {
  }
}

__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, uint4 value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, float value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
      "r"(__float_as_uint(value)), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, double value) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
      "l"(__double_as_longlong(value)), "r"(barrier)
      : "memory");
}

// How a cluster shares H' columns, at compile time.
template <int kPaddedSize, int kBlocks, int kWarpsOfTile = kSplits>
struct Shares {
  enum : int {
    kParts = kWarpsOfTile,
    kPadded = kPaddedSize,
    kCluster = kBlocks,
    kColumns = kPadded / kCluster,
    kTiles = kColumns / kTile,
    kThreads = kTiles * kParts * kWarp,
    // Blocks that a multiprocessor is to have room for.
    kAtHome = kPadded <= 256 && kParts == kSplits ? 2 : 1,
  };
  static_assert(kParts == kSplits || kParts == 2 * kSplits,
                "sums of partial ones are made for these");
};

// Where a warp and its lanes are, in a block of so many columns. A lane has four sums of each gate:
// of two neighbouring rows of the batch, each for two columns.
struct Place {
  explicit __device__ Place(int columns, int parts = kSplits) {
    lane = threadIdx.x % kWarp;
    split = threadIdx.x / kWarp % parts;
    tile = threadIdx.x / kWarp / parts;
    rank = cluster_rank();
    first_column = rank * columns + tile * kTile;
  }
  __device__ int warp() const { return tile * kSplits + split; }

  int lane, split, tile;
  uint32_t rank;
  int first_column;  // of the warp
};

// A float where libtorch allows tf32: multiplied as a half, which has as many digits, with a power
// of two for its row, and so for any size. A row of weights has its own (`scales` of the
// parameters), h another.
struct ScaledHalf {};

// What is multiplied as T, in memory and by tensor cores.
template <typename T>
using Operand = std::conditional_t<std::is_same_v<T, ScaledHalf>, __half, T>;

// Of the warps that share columns.
__device__ __forceinline__ void barrier_of_tile(const Place& place, int parts) {
  barrier_of(1 + place.tile, parts * kWarp);
}

// Zero if it is not `valid`; then nothing is read.
template <typename T>
__device__ __forceinline__ void copy_async(T* to, const T* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "n"(sizeof(T)), "r"(valid ? static_cast<int>(sizeof(T)) : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all but the last kPending groups of this thread are there.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// In the precision that a half kind or tf32 can show, and quickly; for float in its own, for double
// exactly. T is what is multiplied.
template <typename T, typename G>
struct Activation {
  static __device__ __forceinline__ G of_gate(G x) { return sigmoid(x); }
  static __device__ __forceinline__ G of_candidate(G x) { return elu(x); }
  static __device__ __forceinline__ G candidate_grad(G x) { return elu_grad(x); }
  static __device__ __forceinline__ G of_c(G x) { return std::tanh(x); }
};

template <typename T>
struct Activation<T, float> {
  static __device__ __forceinline__ float of_gate(float x) {
    if constexpr (std::is_same_v<T, float>) return float_sigmoid(x);
    return fast_reciprocal(1.0f + fast_exp(-x));
  }

  static __device__ __forceinline__ float of_candidate(float x) {
    if constexpr (std::is_same_v<T, float>) return float_elu(x);
    // exp(x) - 1 loses its digits near 0, where few terms of the series are enough.
    float series = 1.0f / 120 * x + 1.0f / 24;
    series = series * x + 1.0f / 6;
    series = series * x + 0.5f;
    series = series * x * x + x;
    const float negative = x > -0.25f ? series : fast_exp(x) - 1.0f;
    return x > 0 ? x : negative;
  }

  static __device__ __forceinline__ float candidate_grad(float x) {
    if constexpr (std::is_same_v<T, float>) return elu_grad(x);
    return x > 0 ? 1.0f : fast_exp(x);
  }

  static __device__ __forceinline__ float of_c(float x) {
    if constexpr (std::is_same_v<T, float>) return float_tanh(x);
    // As above, and without a branch.
    const float square = x * x;
    float series = -17.0f / 315 * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = series * square * x + x;
    const float other = 1.0f - 2.0f * fast_reciprocal(1.0f + fast_exp(2 * x));
    return fabsf(x) < 0.25f ? series : other;
  }
};

// The compiler moves no load across: it would keep more addresses than there are registers.
__device__ __forceinline__ void few_at_a_time() { asm volatile("" ::: "memory"); }

// And computes what depends on `of` anew.
template <typename Index>
__device__ __forceinline__ void few_at_a_time(Index& of) {
  asm volatile("" : "+r"(of)::"memory");
}

__device__ __forceinline__ uint32_t bits_of(__half value) { return __half_as_ushort(value); }
__device__ __forceinline__ uint32_t bits_of(__nv_bfloat16 value) {
  return __bfloat16_as_ushort(value);
}

// Columns of a row that four lanes take with 16 bytes each.
template <typename T>
constexpr int kSpan = 4 * kLanesOf16Bytes<T>;

// Terms of a sum that one instruction adds.
constexpr int kDepth = 16;

// sums += a b, where a is 16 × kDepth, b kDepth × 8, and each lane has its part of them.
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// sums += a b, where a is 16 × 16 or 16 × 8, and b has 8 columns.
[[maybe_unused]] __device__ __forceinline__ void multiply_add(double (&sums)[4],
                                                              const double (&a)[8],
                                                              const double (&b)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, "
      "{%4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, {%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(a[4]), "d"(a[5]), "d"(a[6]), "d"(a[7]),
        "d"(b[0]), "d"(b[1]), "d"(b[2]), "d"(b[3]));
}

[[maybe_unused]] __device__ __forceinline__ void multiply_add(double (&sums)[4],
                                                              const double (&a)[4],
                                                              const double (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
      "%9}, "
      "{%0, %1, %2, %3};"
      : "+d"(sums[0]), "+d"(sums[1]), "+d"(sums[2]), "+d"(sums[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
}

// b of two products, for 8 rows of 64 bytes: ldmatrix takes the address of a row's 16 bytes from
// each lane, row first.
__device__ __forceinline__ void load_operands(uint32_t (&b)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(address)
               : "memory");
}

// Which term the lane's part of `a` is for, of those of a product; with the one behind.
__device__ __forceinline__ int term_of(int part, int lane) { return lane % 4 * 2 + part / 2 * 8; }

// The lane's part of `a`, from at(term).
template <typename At>
__device__ __forceinline__ uint32_t operand(const At& at, int term) {
  return bits_of(at(term)) | bits_of(at(term + 1)) << 16;
}

}  // namespace
}  // namespace tch_extension
