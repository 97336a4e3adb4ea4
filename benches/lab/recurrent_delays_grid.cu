// Checks the LLTM kernels of a grid as recurrent_delays_cluster.cu checks those of clusters: each
// warp sleeps for a random time before it reads what other blocks send, and before and after the
// barriers of its block. From the root of the repository:
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 --expt-relaxed-constexpr -I csrc
//     -I csrc/include -o recurrent_delays_grid benches/lab/recurrent_delays_grid.cu &&
//     ./recurrent_delays_grid
//
// With -DWITH_MBARRIERS, each named barrier is replaced by an mbarrier at which the same threads
// arrive. This is for compute-sanitizer's racecheck, which ignores bar.arrive
// (docs/lab/methods.md).
#include "recurrent/grid/messages.h"
#include "recurrent_delays.h"

namespace tch_extension {

namespace hopper {
namespace {

// Returns zeros for a message that did not arrive in time. Zeros do not mark a missing message, so
// the reader stops waiting.
__device__ uint4 late_load_relaxed_4_words(const void* from) {
  sleep_sometimes(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) >> 9), 16);
  return is_too_late() ? uint4{} : load_relaxed_4_words(from);
}

__device__ uint4 late_load_relaxed_2_halves(const void* from) {
  sleep_sometimes(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) >> 9), 16);
  return is_too_late() ? uint4{} : load_relaxed_2_halves(from);
}

__device__ uint2 late_load_relaxed_2_words(const void* from) {
  sleep_sometimes(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) >> 9), 16);
  return is_too_late() ? uint2{} : load_relaxed_2_words(from);
}

#ifdef WITH_MBARRIERS
constexpr int kBarriers = 16;
// The number of arrivals that complete a barrier's phase. It is a multiple of every number of
// threads that meet, so that each thread can arrive with an equal share.
constexpr int kArrivals = 5760;

__device__ uint32_t address_of_barrier(int id) {
  __shared__ uint64_t barriers[kBarriers];
  return shared_address(barriers + id);
}

// Initialises the barriers. All threads of the block call this once.
__device__ void begin_barriers() {
  if (threadIdx.x == 0) {
    for (int id = 0; id < kBarriers; ++id) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address_of_barrier(id)),
                   "r"(kArrivals)
                   : "memory");
    }
  }
  __syncthreads();
}

__device__ uint64_t arrive(int id, int threads) {
  if (kArrivals % threads != 0) __trap();
  uint64_t phase;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1], %2;"
               : "=l"(phase)
               : "r"(address_of_barrier(id)), "r"(kArrivals / threads)
               : "memory");
  return phase;
}

__device__ void meet(int id, int threads) {
  const uint64_t phase = arrive(id, threads);
  uint32_t is_over = 0;
  while (is_over == 0 && !is_too_late()) {
    asm volatile(
        "{\n.reg .pred over;\nmbarrier.try_wait.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, "
        "0, over;\n}"
        : "=r"(is_over)
        : "r"(address_of_barrier(id)), "l"(phase)
        : "memory");
  }
}

template <int kRegisters>
__device__ void begin_and_take_registers() {
  begin_barriers();
  take_registers<kRegisters>();
}

template <int kRegisters>
__device__ void begin_and_give_registers() {
  begin_barriers();
  give_registers<kRegisters>();
}
#else
__device__ void arrive(int id, int threads) { named_barrier_arrive(id, threads); }
__device__ void meet(int id, int threads) { named_barrier_sync(id, threads); }
#endif

// Delays the warps that multiply in some runs, the warps that finish gates in others, and both in
// the rest.
__device__ void sleep_at_barrier(int id) {
  const bool multiplies = threadIdx.x < recurrent::grid::kProducers;
  if (seed % 3 == (multiplies ? 1 : 2)) return;
  sleep_sometimes(static_cast<uint32_t>(id), 8);
  // Keep the code after the sleep from moving before it, and let the warp converge again.
  __syncwarp();
}

__device__ void late_named_barrier_sync(int id, int threads) {
  sleep_at_barrier(id);
  meet(id, threads);
  sleep_at_barrier(id + 16);
}

__device__ void late_named_barrier_arrive(int id, int threads) {
  sleep_at_barrier(id);
  arrive(id, threads);
  sleep_at_barrier(id + 16);
}

}  // namespace
}  // namespace hopper
}  // namespace tch_extension

#ifdef WITH_MBARRIERS
#define take_registers begin_and_take_registers
#define give_registers begin_and_give_registers
// The wide kernels have one __syncthreads, at their beginning.
#define __syncthreads begin_barriers
#endif
#define named_barrier_sync late_named_barrier_sync
#define named_barrier_arrive late_named_barrier_arrive
#define load_relaxed_4_words late_load_relaxed_4_words
#define load_relaxed_2_halves late_load_relaxed_2_halves
#define load_relaxed_2_words late_load_relaxed_2_words
#include "lltm/grid_backward_hopper.cu"
#include "lltm/grid_forward_hopper.cu"
#include "lltm/plain_grid_backward_hopper.cu"
#include "lltm/plain_grid_forward_hopper.cu"
#include "lltm/wide_grid_backward_hopper.cu"
#include "lltm/wide_grid_forward_hopper.cu"

namespace {

template <typename Params>
using Start = tch_extension::LaunchStatus(const Params*, bool*, cudaStream_t);

template <typename Params>
void start(Start<Params>* of, const Params& params) {
  bool fits = false;
  check(of(&params, &fits, nullptr));
  if (fits) return;
  std::printf("not all blocks run at once\n");
  std::exit(1);
}

// How blocks share the work: the columns of h for each block, forward and backward, and the number
// of groups of rows.
struct Share {
  int columns;
  int columns_backward;
  int row_groups;
};

template <typename S, typename T, bool kIsScaled>
void expect_of_kernels(int runs, int rows, int hidden, Share share, const char* grid,
                       Start<tch_extension::recurrent::grid::ForwardParams>* start_forward,
                       Start<tch_extension::recurrent::grid::BackwardParams>* start_backward) {
  tch_extension::recurrent::grid::ForwardParams forward{};
  tch_extension::recurrent::grid::BackwardParams backward{};
  forward.columns = share.columns;
  backward.columns = share.columns_backward;
  forward.row_groups = backward.row_groups = share.row_groups;
  char how[80];
  std::snprintf(how, sizeof how, "%s, %d columns a block, %d groups of rows", grid, share.columns,
                share.row_groups);
  expect_the_same_bits<S, T, kIsScaled>(
      rows, hidden, runs, forward, backward, how, [&](const auto& params) {
        if constexpr (std::is_same_v<decltype(params),
                                     const tch_extension::recurrent::grid::ForwardParams&>) {
          start(start_forward, params);
        } else {
          start(start_backward, params);
        }
      });
}

template <typename S, typename T, bool kIsScaled = false>
void expect_of_grid(int runs, int rows, int hidden, int columns, int row_groups) {
  expect_of_kernels<S, T, kIsScaled>(runs, rows, hidden, {columns, columns, row_groups}, "grid",
                                     tch_extension_lltm_grid_forward_cuda,
                                     tch_extension_lltm_grid_backward_cuda);
}

template <typename S, typename T, bool kIsScaled = false>
void expect_of_wide_grid(int runs, int rows, int hidden, int row_groups) {
  constexpr int kColumns = 32;
  expect_of_kernels<S, T, kIsScaled>(runs, rows, hidden, {kColumns, kColumns, row_groups},
                                     "wide grid", tch_extension_lltm_grid_wide_forward_cuda,
                                     tch_extension_lltm_grid_wide_backward_cuda);
}

template <typename T>
void expect_of_plain_grid(int runs, int rows, int hidden, int columns, int row_groups) {
  constexpr int kColumnsBackward = 16;
  expect_of_kernels<T, T, false>(runs, rows, hidden, {columns, kColumnsBackward, row_groups},
                                 "plain grid", tch_extension_lltm_grid_plain_forward_cuda,
                                 tch_extension_lltm_grid_plain_backward_cuda);
}

}  // namespace

int main(int count, char** arguments) {
  const int runs = runs_of(count, arguments);
  expect_of_grid<__nv_bfloat16, __nv_bfloat16>(runs, 17, 136, 16, 3);
  expect_of_grid<__half, __half>(runs, 60, 512, 32, 3);
  expect_of_grid<__nv_bfloat16, __nv_bfloat16>(runs, 20, 520, 16, 1);
  expect_of_grid<__nv_bfloat16, __nv_bfloat16>(runs, 40, 768, 32, 5);
  expect_of_grid<__nv_bfloat16, __nv_bfloat16>(runs, 17, 1000, 32, 1);
  expect_of_grid<__half, __half>(runs, 16, 1024, 16, 2);
  expect_of_grid<__nv_bfloat16, __nv_bfloat16>(runs, 9, 1288, 16, 1);
  expect_of_grid<__half, __half>(runs, 9, 2048, 16, 1);
  expect_of_grid<float, __nv_bfloat16>(runs, 33, 520, 32, 2);
  expect_of_grid<float, __half, true>(runs, 17, 264, 16, 3);
  expect_of_grid<float, __half, true>(runs, 60, 512, 32, 3);
  expect_of_grid<float, __half, true>(runs, 17, 768, 32, 1);
  expect_of_grid<float, __half, true>(runs, 40, 1024, 32, 4);
  expect_of_grid<float, __half, true>(runs, 9, 1288, 16, 1);
  expect_of_grid<float, __half, true>(runs, 9, 2048, 16, 1);
  expect_of_wide_grid<__nv_bfloat16, __nv_bfloat16>(runs, 70, 136, 1);
  expect_of_wide_grid<__half, __half>(runs, 70, 512, 2);
  expect_of_wide_grid<float, __half>(runs, 65, 768, 2);
  expect_of_wide_grid<__nv_bfloat16, __nv_bfloat16>(runs, 130, 1000, 3);
  expect_of_wide_grid<__half, __half>(runs, 150, 1024, 3);
  expect_of_wide_grid<float, __half, true>(runs, 70, 512, 2);
  expect_of_wide_grid<float, __half, true>(runs, 130, 520, 3);
  expect_of_wide_grid<float, __half, true>(runs, 65, 768, 2);
  expect_of_wide_grid<float, __half, true>(runs, 70, 1000, 2);
  expect_of_wide_grid<float, __half, true>(runs, 150, 1024, 3);
  expect_of_plain_grid<float>(runs, 9, 128, 16, 2);
  expect_of_plain_grid<float>(runs, 40, 256, 4, 1);
  expect_of_plain_grid<float>(runs, 17, 512, 4, 1);
  expect_of_plain_grid<float>(runs, 16, 768, 6, 1);
  expect_of_plain_grid<float>(runs, 24, 768, 6, 1);
  expect_of_plain_grid<float>(runs, 13, 656, 6, 1);
  expect_of_plain_grid<float>(runs, 70, 240, 16, 3);
  expect_of_plain_grid<float>(runs, 60, 512, 16, 4);
  expect_of_plain_grid<float>(runs, 17, 768, 16, 2);
  expect_of_plain_grid<float>(runs, 64, 1008, 16, 2);
  expect_of_plain_grid<double>(runs, 17, 56, 16, 2);
  expect_of_plain_grid<double>(runs, 20, 128, 4, 1);
  expect_of_plain_grid<double>(runs, 33, 256, 4, 2);
  expect_of_plain_grid<double>(runs, 16, 376, 6, 2);
  expect_of_plain_grid<double>(runs, 70, 128, 16, 3);
  expect_of_plain_grid<double>(runs, 24, 256, 16, 2);
  expect_of_plain_grid<double>(runs, 17, 384, 16, 3);
  expect_of_plain_grid<double>(runs, 40, 504, 16, 3);
  return 0;
}
