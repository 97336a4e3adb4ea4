// relu(lhs rhs + bias) with a bias of full shape, in half precision, for GPUs of compute capability
// 9.0. The bias of one tile is read while another tile is multiplied, which cuBLASLt's kernels do
// not do.
//
// Blocks are persistent: each computes one tile of the output after another. One thread loads tiles
// of lhs and rhs into a ring buffer. Two warpgroups alternate: while one multiplies for its tile,
// the other adds the bias to the sums of its own tile. The bias is loaded into, and the output is
// stored from, the same buffer in shared memory, 64 columns of the tile at a time.
#include "../hopper/bulk_copy.h"
#include "../hopper/convert.h"
#include "../hopper/processors.h"
#include "../hopper/registers.h"
#include "../hopper/wgmma.h"
#include "product.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::gemm {
namespace {

constexpr int kTile = 128;  // rows and columns of the output
constexpr int kInner = 64;  // elements of K per stage of the ring buffer: 128 bytes
constexpr int kBox = 64;    // elements of a row per bulk copy: 128 bytes
constexpr int kStages = 6;
constexpr int kGroups = 2;  // warpgroups that multiply
constexpr int kChunks = kTile / kBox;
constexpr int kTileBytes =
    // Of lhs or rhs in one stage, and of a chunk of the output.
    kTile * kInner * 2;
[[maybe_unused]] constexpr int kBoxBytes = kBox * kInner * 2;
constexpr int kAlignment = 1024;  // of swizzled buffers
constexpr int kSharedBytes = (2 * kStages + kGroups) * kTileBytes + kAlignment;
constexpr int kGroupThreads = 128;
constexpr int kBlockThreads = (1 + kGroups) * kGroupThreads;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasCode = true;
#else
constexpr bool kHasCode = false;
#endif

struct Params {
  CUtensorMap lhs;
  CUtensorMap rhs;
  CUtensorMap bias;
  CUtensorMap out;
  int32_t tiles_m;
  int32_t tiles_n;
  int32_t tiles;
  int32_t steps;  // iterations over K, of kInner elements each
  // 0 if the whole batch shares the matrix, otherwise 1.
  int32_t lhs_batch;
  int32_t rhs_batch;
  int32_t bias_batch;
};

// The position of a tile in the output. Tiles are ordered in bands of up to kBand rows of tiles,
// and column by column within a band, so that tiles that are computed at the same time read the
// same parts of lhs and rhs.
struct Place {
  int row;
  int column;
  int batch;

  __device__ __forceinline__ Place(const Params& params, int tile) {
    constexpr int kBand = 8;
    const int of_batch = params.tiles_m * params.tiles_n;
    const int in_batch = tile % of_batch;
    const int of_band = kBand * params.tiles_n;
    const int first = in_batch / of_band * kBand;
    const int rows = min(params.tiles_m - first, kBand);
    batch = tile / of_batch;
    row = (first + in_batch % of_band % rows) * kTile;
    column = in_batch % of_band / rows * kTile;
  }
};

struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t bias[kGroups];   // the chunk of the bias has arrived
  uint64_t sums[kGroups];   // the chunk of the output is complete, in place of the bias
  uint64_t order[kGroups];  // the group may multiply
};

struct Shared {
  uint32_t ring;
  uint32_t full;
  uint32_t empty;
  uint32_t chunk;  // the group's buffer for bias and output
  uint32_t bias;
  uint32_t sums;
};

// The stage of the ring buffer after `uses` uses of the ring. `round` is the number of earlier uses
// of this stage modulo 2, which is the parity to wait for.
struct Stage {
  int index;
  uint32_t round;

  __device__ __forceinline__ explicit Stage(uint32_t uses)
      : index(uses % kStages), round(uses / kStages & 1) {}
};

[[maybe_unused]] __device__ __forceinline__ void advance(Stage& stage) {
  if (++stage.index == kStages) stage.index = 0, stage.round ^= 1;
}

template <bool kAcross>
__device__ __forceinline__ void load_factors(const Params& params, const Shared& shared) {
  Stage stage(0);
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    const Place place(params, tile);
    const int lhs_batch = place.batch * params.lhs_batch;
    const int rhs_batch = place.batch * params.rhs_batch;
    for (int step = 0; step < params.steps; ++step, advance(stage)) {
      hopper::mbarrier_wait(shared.empty + 8 * stage.index, stage.round ^ 1);
      const uint32_t full = shared.full + 8 * stage.index;
      const uint32_t lhs = shared.ring + stage.index * 2 * kTileBytes;
      const uint32_t rhs = lhs + kTileBytes;
      const int inner = step * kInner;
      hopper::mbarrier_arrive_expecting(full, 2 * kTileBytes);
      hopper::load_box(lhs, params.lhs, full, inner, place.row, lhs_batch);
      if constexpr (kAcross) {
        for (int part = 0; part < kTile / kBox; ++part) {
          hopper::load_box(rhs + part * kBoxBytes, params.rhs, full, place.column + part * kBox,
                           inner, rhs_batch);
        }
      } else {
        hopper::load_box(rhs, params.rhs, full, inner, place.column, rhs_batch);
      }
    }
  }
}

__device__ __forceinline__ void load_bias(const Params& params, const Shared& shared, int tile,
                                          int chunk) {
  const Place place(params, tile);
  hopper::mbarrier_arrive_expecting(shared.bias, kTileBytes);
  hopper::load_box(shared.chunk, params.bias, shared.bias, place.column + chunk * kBox, place.row,
                   place.batch * params.bias_batch);
}

// Moves the chunks of one group's tiles: loads the bias, stores the output when it is complete, and
// loads the next bias into the same buffer.
[[maybe_unused]] __device__ __forceinline__ void move_chunks(const Params& params,
                                                             const Shared& shared, int group) {
  const int step = kGroups * gridDim.x;
  int tile = blockIdx.x + group * gridDim.x;
  if (tile < params.tiles) load_bias(params, shared, tile, 0);
  uint32_t parity = 0;
  for (; tile < params.tiles; tile += step) {
    const Place place(params, tile);
    for (int chunk = 0; chunk < kChunks; ++chunk, parity ^= 1) {
      hopper::mbarrier_wait(shared.sums, parity);
      hopper::store_box(params.out, shared.chunk, place.column + chunk * kBox, place.row,
                        place.batch);
      hopper::wait_for_reads_of_stores();
      const bool is_last = chunk + 1 == kChunks;
      const int next = is_last ? tile + step : tile;
      if (next < params.tiles) load_bias(params, shared, next, is_last ? 0 : chunk + 1);
    }
  }
  hopper::wait_for_stores();
}

constexpr int kParts = kTile / 64;  // each wgmma multiplies 64 of a group's rows

// Multiplies over all of K for one tile. `first_use` is the number of uses of the ring buffer
// before this tile. `order_of_other` is the barrier of the other group, which may start multiplying
// as soon as this group has started its last product.
template <typename T, bool kAcross>
__device__ __forceinline__ void multiply_tile(const Params& params, const Shared& shared,
                                              uint32_t first_use, uint32_t order_of_other,
                                              float (&sum)[kParts][64]) {
  const int lane = threadIdx.x % kWarp;
  Stage stage(first_use);
  int before = 0;
  for (int step = 0; step < params.steps; ++step, advance(stage)) {
    hopper::mbarrier_wait(shared.full + 8 * stage.index, stage.round);
    const uint32_t at = shared.ring + stage.index * 2 * kTileBytes;
    const uint64_t lhs = hopper::tile_descriptor<false>(at);
    const uint64_t rhs = hopper::tile_descriptor<kAcross>(at + kTileBytes);
    hopper::begin_products();
#pragma unroll
    for (int inner = 0; inner < kInner / 16; ++inner) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        hopper::warpgroup_multiply<T, kAcross>(
            sum[part], lhs + part * (kBoxBytes >> 4) + inner * hopper::kNextInner<false>,
            rhs + inner * hopper::kNextInner<kAcross>, step + inner);
      }
    }
    hopper::commit_products();
    // After this wait only the products of this stage are in flight. Those of the previous stage
    // are complete.
    hopper::wait_for_products<1>();
    if (step > 0 && lane == 0) hopper::mbarrier_arrive(shared.empty + 8 * before);
    before = stage.index;
  }
  if (lane == 0) hopper::mbarrier_arrive(order_of_other);
  hopper::wait_for_products<0>();
  // The compiler must not read the sums before this point.
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 64; ++i) hopper::compiler_barrier(sum[part][i]);
  }
  if (lane == 0) hopper::mbarrier_arrive(shared.empty + 8 * before);
}

// Writes relu(sum + bias) in place of the bias. The buffer has the 128-byte swizzle of bulk copies,
// which avoids bank conflicts: the eight 16-byte parts of a row are permuted by the row's number
// modulo 8.
template <typename T>
__device__ __forceinline__ void add_bias(uint8_t* chunk, int first,
                                         const float (&sum)[kParts][64]) {
  const int row = threadIdx.x / kWarp % 4 * 16 + threadIdx.x % kWarp / 4;
  const int column = threadIdx.x % 4 * 4;
  const auto at = [&](int part, int half, int eighth) {
    const int bytes = (part * 64 + half * 8 + row) * 128 + (eighth ^ row % 8) * 16 + column;
    return reinterpret_cast<uint32_t*>(chunk + bytes);
  };
  uint32_t bias[kParts][2][8];
#pragma unroll
  for (int i = 0; i < kParts * 16; ++i)
    bias[i / 16][i / 8 % 2][i % 8] = *at(i / 16, i / 8 % 2, i % 8);
#pragma unroll
  for (int i = 0; i < kParts * 16; ++i) {
    const int part = i / 16;
    const int half = i / 8 % 2;
    const int eighth = i % 8;
    const float* pair = &sum[part][(first + eighth) * 4 + half * 2];
    const float2 more = hopper::as_floats<T>(bias[part][half][eighth]);
    *at(part, half, eighth) = hopper::rounded_relu<T>({pair[0] + more.x, pair[1] + more.y});
  }
}

template <typename T, bool kAcross>
__device__ __forceinline__ void compute(const Params& params, const Shared& shared, uint8_t* chunk,
                                        int group, uint32_t order) {
  float sum[kParts][64];
  uint32_t order_parity = group == 0 ? 1 : 0;
  uint32_t bias_parity = 0;
  uint32_t first_use = group * params.steps;
  for (int tile = blockIdx.x + group * gridDim.x; tile < params.tiles;
       tile += kGroups * gridDim.x) {
    // This wait protects the ring buffer, too. A barrier has only one bit of parity: if a group
    // waited for a phase that is two rounds ahead, it would take an earlier phase of the same
    // parity for it.
    hopper::mbarrier_wait(order + 8 * group, order_parity);
    order_parity ^= 1;
    multiply_tile<T, kAcross>(params, shared, first_use, order + 8 * (1 - group), sum);
    first_use += kGroups * params.steps;
#pragma unroll
    for (int part = 0; part < kChunks; ++part, bias_parity ^= 1) {
      hopper::mbarrier_wait(shared.bias, bias_parity);
      add_bias<T>(chunk, part * 8, sum);
      hopper::fence_for_bulk_copies();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) hopper::mbarrier_arrive(shared.sums);
    }
  }
}

[[maybe_unused]] __device__ __forceinline__ void init(Barriers& barriers) {
  constexpr int kWarps = kGroupThreads / kWarp;
  for (int i = 0; i < kStages; ++i) {
    hopper::mbarrier_init<1>(hopper::shared_address(&barriers.full[i]));
    hopper::mbarrier_init<kWarps>(hopper::shared_address(&barriers.empty[i]));
  }
  for (int i = 0; i < kGroups; ++i) {
    hopper::mbarrier_init<1>(hopper::shared_address(&barriers.bias[i]));
    hopper::mbarrier_init<kWarps>(hopper::shared_address(&barriers.sums[i]));
    hopper::mbarrier_init<kWarps>(hopper::shared_address(&barriers.order[i]));
  }
  hopper::fence_for_bulk_copies();
}

// kAcross: rhs is contiguous along N, not along K.
template <typename T, bool kAcross>
__device__ __forceinline__ void compute_block(const Params& params) {
  extern __shared__ uint8_t memory[];
  __shared__ Barriers barriers;
  if (threadIdx.x == 0) init(barriers);
  __syncthreads();
  // The shuffle tells the compiler that the value is the same in all lanes.
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarp, 0);
  const uint32_t unaligned = hopper::shared_address(memory);
  const uint32_t ring = round_up(unaligned, kAlignment);
  const auto shared = [&](int group) -> Shared {
    return {ring,
            hopper::shared_address(barriers.full),
            hopper::shared_address(barriers.empty),
            ring + (2 * kStages + group) * kTileBytes,
            hopper::shared_address(&barriers.bias[group]),
            hopper::shared_address(&barriers.sums[group])};
  };
  if (warp / 4 == 0) {
    hopper::give_registers<40>();
    const bool is_elected = threadIdx.x % kWarp == 0;
    if (warp == 0 && is_elected) load_factors<kAcross>(params, shared(0));
    if (warp > 0 && warp <= kGroups && is_elected) move_chunks(params, shared(warp - 1), warp - 1);
  } else {
    hopper::take_registers<232>();
    const int group = warp / 4 - 1;
    const Shared mine = shared(group);
    compute<T, kAcross>(params, mine, memory + (mine.chunk - unaligned), group,
                        hopper::shared_address(barriers.order));
  }
}

// The kernel is empty if it is not compiled for sm_90a. It then has no barriers in static shared
// memory either, which is how the host recognises an empty kernel.
template <typename T, bool kAcross>
__global__ void __launch_bounds__(kBlockThreads, 1)
    hopper_product_kernel(const __grid_constant__ Params params) {
  if constexpr (kHasCode) compute_block<T, kAcross>(params);
}

using Kernel = void (*)(Params);

template <typename T>
Kernel kernel_of(bool across) {
  return across ? hopper_product_kernel<T, true> : hopper_product_kernel<T, false>;
}

Kernel kernel_of(const Product& product) {
  const bool across = product.rhs.column == 1;
  return product.kind == kTchExtensionHalf ? kernel_of<__half>(across)
                                           : kernel_of<__nv_bfloat16>(across);
}

template <typename T>
const void* address_of(bool across) {
  return reinterpret_cast<const void*>(kernel_of<T>(across));
}

// The number of multiprocessors; 0 if the current device cannot run the kernels.
int processors() {
  static hopper::Processors known;
  return known.of_current({address_of<__half>(false), address_of<__half>(true),
                           address_of<__nv_bfloat16>(false), address_of<__nv_bfloat16>(true)},
                          kSharedBytes, sizeof(Barriers));
}

// Whether a matrix meets the requirements of bulk copies: a 16-byte aligned address, contiguous
// rows that do not overlap, strides that are multiples of 16 bytes and below 2^40 bytes, and a
// batch stride that is a multiple of the row stride. The batch stride may be 0.
bool is_reachable(const void* data, int64_t width, int64_t neighbour, int64_t row, int64_t batch) {
  constexpr int64_t kLanes = 8;
  constexpr int64_t kMost = int64_t{1} << 38;
  return is_aligned_to_16(data) && neighbour == 1 && row >= width && row % kLanes == 0 &&
         row < kMost && batch % row == 0 && batch < kMost;
}

int64_t tiles_of(int64_t size) { return ceil_div(size, kTile); }

int64_t tiles_of(const Product& product) {
  return product.batch * tiles_of(product.m) * tiles_of(product.n);
}

bool is_half(const Product& product) {
  return product.kind == kTchExtensionHalf || product.kind == kTchExtensionBFloat16;
}

bool is_matrix(const Matrices& bias) {
  return bias.data != nullptr && bias.row != 0 && bias.column != 0;
}

bool fits(const Product& product) {
  constexpr int64_t kMost = INT32_MAX / 2;
  constexpr int64_t kMostBatch = 65535;
  if (product.m > kMost || product.n > kMost || product.k > kMost || product.batch > kMostBatch)
    return false;
  // Uses of the ring buffer are counted in 32 bits.
  return tiles_of(product.m) * tiles_of(product.n) <= kMost / product.batch &&
         tiles_of(product) <= kMost / (product.k / kInner + 1);
}

// Makes the tensor map of an operand or of the output. Its box has `rows` rows of 128 bytes.
bool describe(CUtensorMap& map, const Product& product, const void* data, int64_t width,
              int64_t height, int64_t row, int64_t batch, int rows) {
  const int64_t batches = batch == 0 ? 1 : product.batch;
  return hopper::make_map(map, {product.kind, data, width, height, batches, row, batch}, kBox,
                          rows);
}

bool describe(const Product& product, Params& params) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = product;
  const bool across = rhs.column == 1;
  return describe(params.lhs, product, lhs.data, k, m, lhs.row, lhs.batch, kTile) &&
         (across ? describe(params.rhs, product, rhs.data, n, k, rhs.row, rhs.batch, kInner)
                 : describe(params.rhs, product, rhs.data, k, n, rhs.column, rhs.batch, kTile)) &&
         describe(params.bias, product, bias.data, n, m, bias.row, bias.batch, kTile) &&
         describe(params.out, product, out, n, m, n, batch == 1 ? 0 : m * n, kTile);
}

}  // namespace
}  // namespace tch_extension::gemm

using namespace tch_extension;
using namespace tch_extension::gemm;

extern "C" bool tch_extension_gemm_hopper_can_cuda(const GemmProduct* product) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = *product;
  const bool across = rhs.column == 1;
  return is_half(*product) && relu && is_matrix(bias) && fits(*product) &&
         is_reachable(lhs.data, k, lhs.column, lhs.row, lhs.batch) &&
         (across ? is_reachable(rhs.data, n, 1, rhs.row, rhs.batch)
                 : is_reachable(rhs.data, k, rhs.row, rhs.column, rhs.batch)) &&
         is_reachable(bias.data, n, bias.column, bias.row, bias.batch) &&
         is_reachable(out, n, 1, n, m * n) && processors() > 0;
}

extern "C" LaunchStatus tch_extension_gemm_hopper_cuda(const GemmProduct* product, bool* is_started,
                                                       cudaStream_t stream) {
  Params params{};
  *is_started = hopper::bind_context() && describe(*product, params);
  if (!*is_started) return {"hopper_product", nullptr};
  params.tiles_m = static_cast<int32_t>(tiles_of(product->m));
  params.tiles_n = static_cast<int32_t>(tiles_of(product->n));
  params.tiles = static_cast<int32_t>(tiles_of(*product));
  params.steps = static_cast<int32_t>(ceil_div(product->k, kInner));
  params.lhs_batch = product->lhs.batch != 0;
  params.rhs_batch = product->rhs.batch != 0;
  params.bias_batch = product->bias.batch != 0;
  const int blocks = processors() < params.tiles ? processors() : params.tiles;
  kernel_of(*product)<<<blocks, kBlockThreads, kSharedBytes, stream>>>(params);
  return launch_status("hopper_product");
}
