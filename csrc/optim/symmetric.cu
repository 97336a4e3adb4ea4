// Products that are known to be symmetric, for the iterations of Muon:
//
//   out = alpha · lhs rhsᵀ + beta · addend + diagonal · I
//
// in fp16 with sums in float, for GPUs of compute capability 9.0. Only the tiles of 256×256 values
// on the diagonal and below it are computed. One below it is stored twice, the second time
// transposed.
//
// A cluster of two blocks computes such a tile, 128 rows each, and then another one. Both need the
// same rows of rhs: each block loads half of them, for both. One thread of a block loads into a
// ring buffer, two warpgroups multiply 64 rows each. They store their sums by way of shared memory
// while the next stages of the ring buffer arrive.
#include "../hopper/bulk_copy.h"
#include "../hopper/cluster.h"
#include "../hopper/cluster_launch.h"
#include "../hopper/convert.h"
#include "../hopper/mma.h"
#include "../hopper/processors.h"
#include "../hopper/registers.h"
#include "../hopper/wgmma.h"
#include "params.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::optim {
namespace {

constexpr int kCluster = 2;
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kGroupRows = 64;
constexpr int kRows = kGroups * kGroupRows;  // of a block
constexpr int kTile = kCluster * kRows;      // rows and columns of a tile
constexpr int kInner = 64;                   // elements of K per stage of the ring buffer
constexpr int kBox = 64;                     // rows and columns of a box: 128 bytes
constexpr int kStages = 4;
constexpr int kBoxBytes = kBox * kBox * 2;
constexpr int kLhsBytes = kRows * kInner * 2;
constexpr int kStageBytes = kLhsBytes + kTile * kInner * 2;
constexpr int kAlignment = 1024;  // of swizzled buffers
// Each group has one box of its sums, and the same transposed.
constexpr int kSharedBytes = kStages * kStageBytes + kGroups * 2 * kBoxBytes + kAlignment;
constexpr int kGroupThreads = 128;
constexpr int kBlockThreads = (1 + kGroups) * kGroupThreads;
constexpr int kWarps = kGroups * kGroupThreads / kWarp;  // that multiply

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasCode = true;
#else
constexpr bool kHasCode = false;
#endif

struct Params {
  CUtensorMap lhs;
  CUtensorMap rhs;
  CUtensorMap out;
  const __half* addend;
  float alpha;
  float beta;
  float diagonal;
  int32_t n;
  int32_t tiles_of_matrix;
  int32_t tiles;
  int32_t steps;  // iterations over K, of kInner elements each
};

// The tile of a cluster: first those of the first 256 rows, then those of the next 256.
struct Place {
  int row;
  int column;
  int batch;

  __device__ __forceinline__ Place(const Params& params, int tile) {
    batch = tile / params.tiles_of_matrix;
    const int rest = tile % params.tiles_of_matrix;
    int down = static_cast<int>((sqrtf(8.0f * rest + 1.0f) - 1.0f) / 2.0f);
    if (down * (down + 1) / 2 > rest) --down;
    if ((down + 1) * (down + 2) / 2 <= rest) ++down;
    row = down * kTile;
    column = (rest - down * (down + 1) / 2) * kTile;
  }

  __device__ __forceinline__ bool is_on_diagonal() const { return row == column; }
};

struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];  // in both blocks
};

struct Shared {
  uint32_t ring;
  uint32_t full;
  uint32_t empty;
  uint32_t boxes;  // the group's: of its sums, and of the same transposed
};

struct Stage {
  int index = 0;
  uint32_t round = 0;  // the parity of the number of earlier uses
};

[[maybe_unused]] __device__ __forceinline__ void advance(Stage& stage) {
  if (++stage.index == kStages) stage.index = 0, stage.round ^= 1;
}

[[maybe_unused]] __device__ __forceinline__ int first_tile() {
  return static_cast<int>(blockIdx.x) / kCluster;
}
[[maybe_unused]] __device__ __forceinline__ int clusters() {
  return static_cast<int>(gridDim.x) / kCluster;
}

// Loads kRows rows from `row` on; for both blocks if `is_shared`.
template <bool kAcross, bool kIsShared>
__device__ __forceinline__ void load_rows(uint32_t to, const CUtensorMap& map, uint32_t full,
                                          int inner, int row, int batch) {
  constexpr uint16_t kBoth = 3;
  // A box has kRows rows if they run along K.
  for (int part = 0; part < (kAcross ? kRows / kBox : 1); ++part) {
    const uint32_t at = to + part * kBoxBytes;
    const int x = kAcross ? row + part * kBox : inner;
    const int y = kAcross ? inner : row;
    if constexpr (kIsShared) {
      hopper::load_box_for(at, map, full, x, y, batch, kBoth);
    } else {
      hopper::load_box(at, map, full, x, y, batch);
    }
  }
}

template <bool kAcross>
__device__ __forceinline__ void load_factors(const Params& params, const Shared& shared, int rank) {
  Stage stage;
  for (int tile = first_tile(); tile < params.tiles; tile += clusters()) {
    const Place place(params, tile);
    for (int step = 0; step < params.steps; ++step, advance(stage)) {
      hopper::mbarrier_wait(shared.empty + 8 * stage.index, stage.round ^ 1);
      const uint32_t full = shared.full + 8 * stage.index;
      const uint32_t lhs = shared.ring + stage.index * kStageBytes;
      const int inner = step * kInner;
      hopper::mbarrier_arrive_expecting(full, kStageBytes);
      load_rows<kAcross, false>(lhs, params.lhs, full, inner, place.row + rank * kRows,
                                place.batch);
      load_rows<kAcross, true>(lhs + kLhsBytes + rank * kRows * kInner * 2, params.rhs, full, inner,
                               place.column + rank * kRows, place.batch);
    }
  }
}

// Multiplies over all of K for one tile.
template <bool kAcross>
__device__ __forceinline__ void multiply(const Params& params, const Shared& shared, int group,
                                         Stage& stage, float (&sum)[kTile / 2]) {
  const int lane = threadIdx.x % kWarp;
  const auto release = [&](int index) {
    if (lane < kCluster) hopper::mbarrier_arrive_in_block(shared.empty + 8 * index, lane);
  };
  int before = 0;
  for (int step = 0; step < params.steps; ++step, advance(stage)) {
    hopper::mbarrier_wait(shared.full + 8 * stage.index, stage.round);
    const uint32_t at = shared.ring + stage.index * kStageBytes;
    const uint64_t lhs = hopper::tile_descriptor<kAcross>(at + group * kBoxBytes);
    const uint64_t rhs = hopper::tile_descriptor<kAcross>(at + kLhsBytes);
    hopper::begin_products();
#pragma unroll
    for (int inner = 0; inner < kInner / 16; ++inner) {
      hopper::warpgroup_multiply<__half, kAcross>(sum, lhs + inner * hopper::kNextInner<kAcross>,
                                                  rhs + inner * hopper::kNextInner<kAcross>,
                                                  step + inner);
    }
    hopper::commit_products();
    // The products of the previous stage are complete.
    hopper::wait_for_products<1>();
    if (step > 0) release(before);
    before = stage.index;
  }
  hopper::wait_for_products<0>();
  // The compiler must not read the sums before this point.
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) hopper::compiler_barrier(sum[i]);
  release(before);
}

constexpr int kEighths = kBox / 8;
using Addends = uint32_t[2][kEighths];

// Of the columns of one box, what this thread's sums go with.
__device__ __forceinline__ void load_addends(const Params& params, int batch, int row, int column,
                                             Addends& addends) {
#pragma unroll
  for (int i = 0; i < 2 * kEighths; ++i) {
    const int y = row + i / kEighths * 8;
    const int x = column + i % kEighths * 8;
    const bool is_inside = y < params.n && x < params.n;
    const __half* from = params.addend + (int64_t{batch} * params.n + y) * params.n + x;
    addends[i / kEighths][i % kEighths] =
        is_inside ? __ldg(reinterpret_cast<const unsigned int*>(from)) : 0;
  }
}

// What is stored of a pair of sums in this row, the first of which is in this column.
__device__ __forceinline__ uint32_t result_of(const Params& params, const float* sum,
                                              uint32_t addends, int row, int column) {
  const float2 more = hopper::as_floats<__half>(addends);
  float2 pair = {params.alpha * sum[0] + params.beta * more.x,
                 params.alpha * sum[1] + params.beta * more.y};
  if (row == column) pair.x += params.diagonal;
  if (row == column + 1) pair.y += params.diagonal;
  return hopper::rounded<__half>(pair);
}

// Writes two columns of eight values, of 16 rows of a box, to the box and to the transposed one.
// Both have the 128-byte swizzle of bulk copies.
__device__ __forceinline__ void write_pair(uint32_t boxes, int warp, int eighth,
                                           const uint32_t (&words)[2][kEighths]) {
  const int lane = threadIdx.x % kWarp;
  const int low = lane / 8 % 2;
  const int high = lane / 16;
  const int in_eight = lane % 8;
  const auto at = [&](int row, int part) { return row * 128 + (part ^ row % 8) * 16; };
  hopper::store_matrices<false>(boxes + at(warp * 16 + low * 8 + in_eight, eighth + high),
                                words[0][eighth], words[1][eighth], words[0][eighth + 1],
                                words[1][eighth + 1]);
  hopper::store_matrices<true>(
      boxes + kBoxBytes + at((eighth + high) * 8 + in_eight, warp * 2 + low), words[0][eighth],
      words[1][eighth], words[0][eighth + 1], words[1][eighth + 1]);
}

[[maybe_unused]] __device__ __forceinline__ void store_tile(const Params& params,
                                                            const Shared& shared,
                                                            const Place& place, int rank, int group,
                                                            const float (&sum)[kTile / 2]) {
  const int warp = threadIdx.x / kWarp % 4;
  const int lane = threadIdx.x % kWarp;
  const bool is_elected = threadIdx.x % kGroupThreads == 0;
  const int first = place.row + rank * kRows + group * kGroupRows;
  const int row = first + warp * 16 + lane / 4;
  Addends addends = {};
#pragma unroll
  for (int box = 0; box < kTile / kBox; ++box) {
    const int from = place.column + box * kBox;
    const int column = from + lane % 4 * 2;
    if (params.addend != nullptr) load_addends(params, place.batch, row, column, addends);
    uint32_t words[2][kEighths];
#pragma unroll
    for (int i = 0; i < 2 * kEighths; ++i) {
      const int half = i / kEighths;
      const int eighth = i % kEighths;
      words[half][eighth] = result_of(params, &sum[(box * kEighths + eighth) * 4 + half * 2],
                                      addends[half][eighth], row + half * 8, column + eighth * 8);
    }
    if (is_elected) hopper::wait_for_reads_of_stores();
    hopper::named_barrier_sync(1 + group, kGroupThreads);
#pragma unroll
    for (int eighth = 0; eighth < kEighths; eighth += 2)
      write_pair(shared.boxes, warp, eighth, words);
    hopper::fence_for_bulk_copies();
    hopper::named_barrier_sync(1 + group, kGroupThreads);
    if (is_elected) {
      hopper::store_box(params.out, shared.boxes, from, first, place.batch);
      if (!place.is_on_diagonal())
        hopper::store_box(params.out, shared.boxes + kBoxBytes, first, from, place.batch);
    }
  }
}

template <bool kAcross>
__device__ __forceinline__ void compute(const Params& params, const Shared& shared, int rank,
                                        int group) {
  float sum[kTile / 2];
  Stage stage;
  for (int tile = first_tile(); tile < params.tiles; tile += clusters()) {
    multiply<kAcross>(params, shared, group, stage, sum);
    store_tile(params, shared, Place(params, tile), rank, group, sum);
  }
  if (threadIdx.x % kGroupThreads == 0) {
    hopper::wait_for_reads_of_stores();
    hopper::wait_for_stores();
  }
}

[[maybe_unused]] __device__ __forceinline__ void init(Barriers& barriers) {
  for (int i = 0; i < kStages; ++i) {
    hopper::mbarrier_init<1>(hopper::shared_address(&barriers.full[i]));
    hopper::mbarrier_init<kCluster * kWarps>(hopper::shared_address(&barriers.empty[i]));
  }
  hopper::fence_mbarrier_init();
  hopper::fence_for_bulk_copies();
}

template <bool kAcross>
__device__ __forceinline__ void compute_block(const Params& params) {
  extern __shared__ uint8_t memory[];
  __shared__ Barriers barriers;
  if (threadIdx.x == 0) init(barriers);
  hopper::cluster_sync();
  // The shuffle tells the compiler that the value is the same in all lanes.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
  const int rank = static_cast<int>(hopper::cluster_rank());
  const int group = warp / 4 - 1;
  const uint32_t ring = round_up(hopper::shared_address(memory), kAlignment);
  const Shared shared = {ring, hopper::shared_address(barriers.full),
                         hopper::shared_address(barriers.empty),
                         ring + kStages * kStageBytes + max(group, 0) * 2 * kBoxBytes};
  if (group < 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) load_factors<kAcross>(params, shared, rank);
    __syncwarp();
  } else {
    hopper::take_registers<232>();
    compute<kAcross>(params, shared, rank, group);
    __syncwarp();
  }
  // The other block may still write to this one's shared memory, or arrive at its barriers.
  hopper::cluster_sync();
}

// The kernel is empty if it is not compiled for sm_90a. It then has no barriers in static shared
// memory either, which is how the host recognises an empty kernel. kAcross: the rows of lhs and rhs
// run along the result's rows and columns, not along K.
template <bool kAcross>
__global__ void __launch_bounds__(kBlockThreads, 1)
    symmetric_kernel(const __grid_constant__ Params params) {
  if constexpr (kHasCode) compute_block<kAcross>(params);
}

template <bool kAcross>
const void* address_of() {
  return reinterpret_cast<const void*>(symmetric_kernel<kAcross>);
}

// The number of multiprocessors; 0 if the current device cannot run the kernels.
int processors() {
  static hopper::Processors known;
  return known.of_current({address_of<false>(), address_of<true>()}, kSharedBytes,
                          sizeof(Barriers));
}

int64_t tiles_of(const OptimSymmetric& of) {
  const int64_t down = ceil_div(of.n, int64_t{kTile});
  return down * (down + 1) / 2;
}

// Whether bulk copies reach all matrices, and all numbers fit into 32 bits.
bool fits(const OptimSymmetric& of) {
  constexpr int64_t kLanes = 8;
  constexpr int64_t kMost = 1 << 16;
  const bool is_aligned = is_aligned_to_16(of.lhs) && is_aligned_to_16(of.rhs) &&
                          is_aligned_to_16(of.addend) && is_aligned_to_16(of.out);
  return is_aligned && of.n % kLanes == 0 && (of.is_across != 0 || of.k % kLanes == 0) &&
         of.n > 0 && of.k > 0 && of.batch > 0 && of.n <= kMost && of.k <= INT32_MAX / 2 &&
         of.batch < kMost && tiles_of(of) <= INT32_MAX / 2 / of.batch;
}

bool describe(CUtensorMap& map, const OptimSymmetric& of, const void* data) {
  const int64_t width = of.is_across != 0 ? of.n : of.k;
  const int64_t height = of.is_across != 0 ? of.k : of.n;
  return hopper::make_map(map,
                          {kTchExtensionHalf, data, width, height, of.batch, width, width * height},
                          kBox, of.is_across != 0 ? kInner : kRows);
}

bool describe(Params& params, const OptimSymmetric& of) {
  return describe(params.lhs, of, of.lhs) && describe(params.rhs, of, of.rhs) &&
         hopper::make_map(params.out,
                          {kTchExtensionHalf, of.out, of.n, of.n, of.batch, of.n, of.n * of.n},
                          kBox, kBox);
}

}  // namespace
}  // namespace tch_extension::optim

extern "C" tch_extension::LaunchStatus tch_extension_optim_symmetric_cuda(
    const OptimSymmetric* symmetric, bool* is_started, cudaStream_t stream) {
  using namespace tch_extension;
  using namespace tch_extension::optim;
  const OptimSymmetric& of = *symmetric;
  constexpr const char* kName = "optim_symmetric";
  Params params{};
  *is_started =
      fits(of) && processors() >= kCluster && hopper::bind_context() && describe(params, of);
  if (!*is_started) return {kName, nullptr};
  params.addend = static_cast<const __half*>(of.addend);
  params.alpha = of.alpha;
  params.beta = of.beta;
  params.diagonal = of.diagonal;
  params.n = static_cast<int32_t>(of.n);
  params.tiles_of_matrix = static_cast<int32_t>(tiles_of(of));
  params.tiles = static_cast<int32_t>(tiles_of(of) * of.batch);
  params.steps = static_cast<int32_t>(ceil_div(of.k, int64_t{kInner}));
  const int most = processors() / kCluster;
  const hopper::ClusterLaunch launch(kBlockThreads, kSharedBytes, kCluster,
                                     most < params.tiles ? most : params.tiles, stream);
  (void)cudaLaunchKernelEx(
      &launch.config, of.is_across != 0 ? symmetric_kernel<true> : symmetric_kernel<false>, params);
  return launch_status(kName);
}
