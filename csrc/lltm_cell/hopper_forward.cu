// A block stays on its multiprocessor and computes tiles of 128 rows and 64 hidden columns, one
// after another. Its tile of the product has the same columns of all three gates, so that a thread
// has them together and can compute h' and c'. One thread loads tiles of [h, x], each from its own
// tensor, and of W into a ring buffer. Two warpgroups alternate: while one multiplies for its tile,
// the other finishes the cells of its own tile. c is loaded to the same place in shared memory from
// which c' is stored.
#include "../hopper/bulk_copy.h"
#include "../hopper/convert.h"
#include "../hopper/processors.h"
#include "../hopper/registers.h"
#include "../hopper/wgmma.h"
#include "functions.h"
#include "lltm_cell.h"

namespace tch_extension {
namespace {

constexpr int kGates = 3;
constexpr int kRows = 128;
constexpr int kColumns = 64;  // columns of each gate: 128 bytes
constexpr int kInner = 64;    // columns of K in a stage of the ring buffer: 128 bytes
constexpr int kStages = 4;
constexpr int kGroups = 2;          // warpgroups that multiply
constexpr int kParts = kRows / 64;  // products of 64 rows each that make up a tile
constexpr int kBoxBytes = 64 * 128;
constexpr int kStageBytes = (kParts + kGates) * kBoxBytes;
constexpr int kSlotBytes = kRows * 128;  // one tile of an output
constexpr int kSlots = 2;                // slots of each group
constexpr int kAlignment = 1024;         // for swizzled memory
constexpr int kSharedBytes = kStages * kStageBytes + kGroups * kSlots * kSlotBytes + kAlignment;
constexpr int kGroupThreads = 128;
constexpr int kBlockThreads = (1 + kGroups) * kGroupThreads;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasCode = true;
#else
constexpr bool kHasCode = false;
#endif

struct Params {
  CUtensorMap h;
  CUtensorMap input;
  CUtensorMap weight;
  CUtensorMap c;
  CUtensorMap new_h;
  CUtensorMap new_c;
  CUtensorMap activations;
  CUtensorMap output;
  const void* bias;
  int32_t hidden;
  int32_t tiles_m;
  int32_t tiles;
  int32_t steps_of_h;  // steps through K, of kInner each, that belong to h
  int32_t steps;
  int32_t save_activations;
  int32_t has_output;
};

// The order of the tiles: bands of up to kBand rows of tiles, each of them column by column. Tiles
// that are computed at the same time then share what they read.
struct Place {
  int row;
  int column;

  __device__ __forceinline__ Place(const Params& params, int tile) {
    constexpr int kBand = 16;
    const int of_band = kBand * (params.hidden / kColumns);
    const int first = tile / of_band * kBand;
    const int rows = min(params.tiles_m - first, kBand);
    row = (first + tile % of_band % rows) * kRows;
    column = tile % of_band / rows * kColumns;
  }
};

struct Barriers {
  uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t c[kGroups];      // c has arrived
  uint64_t order[kGroups];  // the group may multiply
};

struct Shared {
  uint32_t ring;
  uint32_t full;
  uint32_t empty;
  uint32_t slots;  // the group's own, as are the next two
  uint32_t c;
  float* bias;
};

// The next stage of the ring buffer, and the number of its earlier uses modulo 2, which is the
// parity to wait for.
struct Stage {
  int index;
  uint32_t round;

  __device__ __forceinline__ explicit Stage(uint32_t uses)
      : index(uses % kStages), round(uses / kStages & 1) {}
};

[[maybe_unused]] __device__ __forceinline__ void advance(Stage& stage) {
  if (++stage.index == kStages) stage.index = 0, stage.round ^= 1;
}

[[maybe_unused]] __device__ __forceinline__ void load_factors(const Params& params,
                                                              const Shared& shared) {
  Stage stage(0);
  for (int tile = blockIdx.x; tile < params.tiles; tile += gridDim.x) {
    const Place place(params, tile);
    for (int step = 0; step < params.steps; ++step, advance(stage)) {
      hopper::mbarrier_wait(shared.empty + 8 * stage.index, stage.round ^ 1);
      const uint32_t full = shared.full + 8 * stage.index;
      const uint32_t lhs = shared.ring + stage.index * kStageBytes;
      hopper::mbarrier_arrive_expecting(full, kStageBytes);
      if (step < params.steps_of_h) {
        hopper::load_box(lhs, params.h, full, step * kInner, place.row, 0);
      } else {
        hopper::load_box(lhs, params.input, full, (step - params.steps_of_h) * kInner, place.row,
                         0);
      }
      for (int gate = 0; gate < kGates; ++gate) {
        hopper::load_box(lhs + (kParts + gate) * kBoxBytes, params.weight, full, step * kInner,
                         gate * params.hidden + place.column, 0);
      }
    }
  }
}

using Sums = float[kParts][96];

// Multiplies all of K for one tile. `first_use` is the tile's first use of the ring buffer.
// `order_of_other` is the barrier of the other group, which may start multiplying as soon as this
// group has started its last product.
template <typename T>
__device__ __forceinline__ void multiply_tile(const Params& params, const Shared& shared,
                                              uint32_t first_use, uint32_t order_of_other,
                                              Sums& sum) {
  const bool is_elected = threadIdx.x % kWarp == 0;
  Stage stage(first_use);
  int before = 0;
  for (int step = 0; step < params.steps; ++step, advance(stage)) {
    hopper::mbarrier_wait(shared.full + 8 * stage.index, stage.round);
    const uint32_t at = shared.ring + stage.index * kStageBytes;
    const uint64_t lhs = hopper::tile_descriptor<false>(at);
    const uint64_t rhs = hopper::tile_descriptor<false>(at + kParts * kBoxBytes);
    hopper::begin_products();
#pragma unroll
    for (int inner = 0; inner < kInner / 16; ++inner) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        hopper::warpgroup_multiply<T>(
            sum[part], lhs + part * (kBoxBytes >> 4) + inner * hopper::kNextInner<false>,
            rhs + inner * hopper::kNextInner<false>, step + inner);
      }
    }
    hopper::commit_products();
    // While the products of this stage are in flight, those of the preceding stage are complete.
    hopper::wait_for_products<1>();
    if (step > 0 && is_elected) hopper::mbarrier_arrive(shared.empty + 8 * before);
    before = stage.index;
  }
  if (is_elected) hopper::mbarrier_arrive(order_of_other);
  hopper::wait_for_products<0>();
  // The compiler must not read the sums before this point.
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 96; ++i) hopper::compiler_barrier(sum[part][i]);
  }
  if (is_elected) hopper::mbarrier_arrive(shared.empty + 8 * before);
}

// Synchronizes the threads of a group. Barrier number 0 belongs to __syncthreads.
__device__ __forceinline__ void wait_for_group(int group) {
  hopper::named_barrier_sync(1 + group, kGroupThreads);
}

__device__ __forceinline__ bool is_elected_of_group() { return threadIdx.x % kGroupThreads == 0; }

// Loads the bias in f32 for the columns of a tile. The group synchronizes before it reads the bias.
template <typename T>
__device__ __forceinline__ void load_bias(const Params& params, const Shared& shared, int column) {
  for (int i = threadIdx.x % kGroupThreads; i < kGates * kColumns; i += kGroupThreads) {
    const int64_t at = int64_t{i / kColumns} * params.hidden + column + i % kColumns;
    shared.bias[i] =
        params.bias == nullptr ? 0.0f : static_cast<float>(static_cast<const T*>(params.bias)[at]);
  }
}

// Loads c as soon as c' of the preceding tile has been stored.
[[maybe_unused]] __device__ __forceinline__ void load_c(const Params& params, const Shared& shared,
                                                        const Place& place) {
  hopper::wait_for_reads_of_stores();
  hopper::mbarrier_arrive_expecting(shared.c, kSlotBytes);
  hopper::load_box(shared.slots + kSlotBytes, params.c, shared.c, place.column, place.row, 0);
}

// The position of a thread's pair of adjacent columns in a slot. The eight parts of each 128-byte
// row are permuted depending on the row: this is the swizzle of bulk copies, and it avoids bank
// conflicts.
struct Pair {
  int index;  // of the first of the pair's sums
  int bytes;
  int column;

  __device__ __forceinline__ Pair(int part, int eighth, int half) {
    const int lane = threadIdx.x % kWarp;
    const int row = threadIdx.x / kWarp % 4 * 16 + lane / 4;
    const int first = row * 128 + row % 8 * 16 + lane % 4 * 4;
    index = eighth * 4 + half * 2;
    bytes = (first ^ eighth * 16) + part * kBoxBytes + half * 8 * 128;
    column = eighth * 8 + lane % 4 * 2;
  }
};

// Calls body(sums, pair) for all pairs of a thread.
template <typename Body>
__device__ __forceinline__ void for_each_pair(Sums& sum, Body&& body) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      body(sum[part], Pair(part, i / 2, i % 2));
      // One pair at a time, because the sums leave no registers for more.
      hopper::compiler_barrier();
    }
  }
}

template <typename T>
__device__ __forceinline__ void put(uint8_t* slot, const Pair& pair, float x, float y) {
  *reinterpret_cast<uint32_t*>(slot + pair.bytes) = hopper::rounded<T>({x, y});
}

// Computes c' and h' in their slots from c and the sums, and replaces the sums by [σ(i) | σ(o) |
// g].
template <typename T>
__device__ __forceinline__ void finish_cells(uint8_t* slots, const float* bias, Sums& sum) {
  using F = Functions<T>;
  for_each_pair(sum, [&](float (&gates)[96], const Pair& pair) {
    const float2 c =
        hopper::as_floats<T>(*reinterpret_cast<const uint32_t*>(slots + kSlotBytes + pair.bytes));
    float new_h[2];
    float new_c[2] = {c.x, c.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& input = gates[pair.index + i];
      float& output = gates[pair.index + 32 + i];
      float& candidate = gates[pair.index + 64 + i];
      input = F::sigmoid(input + bias[pair.column + i]);
      output = F::sigmoid(output + bias[pair.column + kColumns + i]);
      candidate += bias[pair.column + 2 * kColumns + i];
      new_c[i] += F::elu(candidate) * input;
      new_h[i] = F::tanh(new_c[i]) * output;
    }
    put<T>(slots, pair, new_h[0], new_h[1]);
    put<T>(slots + kSlotBytes, pair, new_c[0], new_c[1]);
  });
}

template <typename T>
__device__ __forceinline__ void put_gate(uint8_t* slot, int gate, Sums& sum) {
  for_each_pair(sum, [&](float (&gates)[96], const Pair& pair) {
    put<T>(slot, pair, gates[pair.index + gate * 32], gates[pair.index + gate * 32 + 1]);
  });
}

// Stores what the group has written to its slots.
template <typename Store>
__device__ __forceinline__ void send_off(int group, Store&& store) {
  hopper::fence_for_bulk_copies();
  wait_for_group(group);
  if (is_elected_of_group()) store();
}

// Waits until the slots may be overwritten.
[[maybe_unused]] __device__ __forceinline__ void wait_for_slots(int group) {
  if (is_elected_of_group()) hopper::wait_for_reads_of_stores();
  wait_for_group(group);
}

template <typename T>
__device__ __forceinline__ void finish_tile(const Params& params, const Shared& shared,
                                            uint8_t* slots, const Place& place, int group,
                                            Sums& sum) {
  // The bias was loaded by other threads of the group.
  wait_for_group(group);
  finish_cells<T>(slots, shared.bias, sum);
  send_off(group, [&] {
    hopper::store_box(params.new_h, shared.slots, place.column, place.row, 0);
    hopper::store_box(params.new_c, shared.slots + kSlotBytes, place.column, place.row, 0);
    if (params.has_output)
      hopper::store_box(params.output, shared.slots, place.column, place.row, 0);
  });
  if (!params.save_activations) return;
  const auto store_gate = [&](int gate, int slot) {
    hopper::store_box(params.activations, shared.slots + slot * kSlotBytes,
                      gate * params.hidden + place.column, place.row, 0);
  };
  wait_for_slots(group);
  put_gate<T>(slots, 0, sum);
  put_gate<T>(slots + kSlotBytes, 1, sum);
  send_off(group, [&] { store_gate(0, 0), store_gate(1, 1); });
  wait_for_slots(group);
  put_gate<T>(slots, 2, sum);
  send_off(group, [&] { store_gate(2, 0); });
}

template <typename T>
__device__ __forceinline__ void compute(const Params& params, const Shared& shared, uint8_t* slots,
                                        int group, uint32_t order) {
  Sums sum;
  uint32_t order_parity = group == 0 ? 1 : 0;
  uint32_t c_parity = 0;
  uint32_t first_use = group * params.steps;
  for (int tile = blockIdx.x + group * gridDim.x; tile < params.tiles;
       tile += kGroups * gridDim.x) {
    const Place place(params, tile);
    if (is_elected_of_group()) load_c(params, shared, place);
    __syncwarp();
    load_bias<T>(params, shared, place.column);
    // This wait protects the ring buffer, too: the parity of a phase that is two rounds ahead is
    // the same as that of a phase that is over.
    hopper::mbarrier_wait(order + 8 * group, order_parity);
    order_parity ^= 1;
    multiply_tile<T>(params, shared, first_use, order + 8 * (1 - group), sum);
    first_use += kGroups * params.steps;
    hopper::mbarrier_wait(shared.c, c_parity);
    c_parity ^= 1;
    finish_tile<T>(params, shared, slots, place, group, sum);
  }
  if (is_elected_of_group()) {
    hopper::wait_for_reads_of_stores();
    hopper::wait_for_stores();
  }
}

[[maybe_unused]] __device__ __forceinline__ void init(Barriers& barriers) {
  constexpr int kWarps = kGroupThreads / kWarp;
  for (int i = 0; i < kStages; ++i) {
    hopper::mbarrier_init<1>(hopper::shared_address(&barriers.full[i]));
    hopper::mbarrier_init<kWarps>(hopper::shared_address(&barriers.empty[i]));
  }
  for (int i = 0; i < kGroups; ++i) {
    hopper::mbarrier_init<1>(hopper::shared_address(&barriers.c[i]));
    hopper::mbarrier_init<kWarps>(hopper::shared_address(&barriers.order[i]));
  }
  hopper::fence_for_bulk_copies();
}

template <typename T>
__device__ __forceinline__ void compute_block(const Params& params) {
  extern __shared__ uint8_t memory[];
  __shared__ Barriers barriers;
  __shared__ float bias[kGroups][kGates * kColumns];
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
            ring + kStages * kStageBytes + group * kSlots * kSlotBytes,
            hopper::shared_address(&barriers.c[group]),
            bias[group]};
  };
  if (warp / 4 == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) load_factors(params, shared(0));
  } else {
    hopper::take_registers<232>();
    const int group = warp / 4 - 1;
    const Shared mine = shared(group);
    compute<T>(params, mine, memory + (mine.slots - unaligned), group,
               hopper::shared_address(barriers.order));
  }
}

// The kernel is empty unless it is compiled for sm_90a. An empty kernel has no barriers in static
// shared memory, and by that the host tells the two apart.
template <typename T>
__global__ void __launch_bounds__(kBlockThreads, 1)
    lltm_cell_hopper_forward_kernel(const __grid_constant__ Params params) {
  if constexpr (kHasCode) compute_block<T>(params);
}

using Kernel = void (*)(Params);

Kernel kernel_of(int32_t kind) {
  return kind == kTchExtensionHalf ? lltm_cell_hopper_forward_kernel<__half>
                                   : lltm_cell_hopper_forward_kernel<__nv_bfloat16>;
}

// The number of multiprocessors; 0 if the current device cannot run the kernels.
int processors() {
  static hopper::Processors known;
  auto address_of = [](int32_t kind) { return reinterpret_cast<const void*>(kernel_of(kind)); };
  return known.of_current({address_of(kTchExtensionHalf), address_of(kTchExtensionBFloat16)},
                          kSharedBytes, sizeof(Barriers));
}

// Whether bulk copies can access a matrix: addresses and strides have to be multiples of 16 bytes,
// and strides less than 2^40 bytes.
bool is_reachable(const void* data, int64_t stride) {
  constexpr int64_t kLanes = 8;
  constexpr int64_t kMost = int64_t{1} << 38;
  return is_aligned_to_16(data) && stride % kLanes == 0 && stride < kMost;
}

bool describe(CUtensorMap& map, const LltmCellFusedForward& cell, const void* data, int64_t width,
              int64_t height, int64_t stride, int rows) {
  return hopper::make_map(map, {cell.kind, data, width, height, 1, stride, stride}, 64, rows);
}

bool describe(const LltmCellFusedForward& cell, Params& params) {
  const int64_t hidden = cell.hidden;
  const int64_t columns = hidden + cell.features;
  // The maps of input, activations and output are not used if there are no such tensors.
  const bool has_input = cell.features > 0;
  const bool saves = cell.activations != nullptr;
  return describe(params.h, cell, cell.h, hidden, cell.batch, cell.h_stride, kRows) &&
         (!has_input || describe(params.input, cell, cell.input, cell.features, cell.batch,
                                 cell.input_stride, kRows)) &&
         describe(params.weight, cell, cell.weight, columns, kGates * hidden, cell.weight_stride,
                  kColumns) &&
         describe(params.c, cell, cell.c, hidden, cell.batch, cell.c_stride, kRows) &&
         describe(params.new_h, cell, cell.new_h, hidden, cell.batch, hidden, kRows) &&
         describe(params.new_c, cell, cell.new_c, hidden, cell.batch, hidden, kRows) &&
         (cell.output == nullptr ||
          describe(params.output, cell, cell.output, hidden, cell.batch, hidden, kRows)) &&
         (!saves || describe(params.activations, cell, cell.activations, kGates * hidden,
                             cell.batch, kGates * hidden, kRows));
}

bool can(const LltmCellFusedForward& cell) {
  const bool is_half = cell.kind == kTchExtensionHalf || cell.kind == kTchExtensionBFloat16;
  constexpr int64_t kMost = INT32_MAX / 4;
  // A step through K does not cross from h to x. Columns beyond the end of x are multiplied with
  // columns beyond the end of W, and both are read as zeros.
  return is_half && cell.hidden % kColumns == 0 && cell.hidden > 0 && cell.batch > 0 &&
         cell.hidden <= kMost && cell.features <= kMost && cell.batch <= kMost &&
         cell.input_gates == nullptr && is_reachable(cell.h, cell.h_stride) &&
         (cell.features == 0 || is_reachable(cell.input, cell.input_stride)) &&
         is_reachable(cell.weight, cell.weight_stride) && is_reachable(cell.c, cell.c_stride) &&
         is_reachable(cell.new_h, cell.hidden) && is_reachable(cell.new_c, cell.hidden) &&
         is_reachable(cell.output, cell.hidden) &&
         is_reachable(cell.activations, kGates * cell.hidden) && processors() > 0;
}

int64_t tiles(const LltmCellFusedForward& cell) {
  return ceil_div(cell.batch, kRows) * (cell.hidden / kColumns);
}

bool start(const LltmCellFusedForward& cell, cudaStream_t stream) {
  Params params{};
  if (!hopper::bind_context() || !describe(cell, params)) return false;
  params.bias = cell.bias;
  params.hidden = static_cast<int32_t>(cell.hidden);
  params.tiles_m = static_cast<int32_t>(ceil_div(cell.batch, kRows));
  params.tiles = static_cast<int32_t>(tiles(cell));
  params.steps_of_h = static_cast<int32_t>(cell.hidden / kInner);
  params.steps = static_cast<int32_t>(params.steps_of_h + ceil_div(cell.features, kInner));
  params.save_activations = cell.activations != nullptr;
  params.has_output = cell.output != nullptr;
  const int blocks = processors() < params.tiles ? processors() : params.tiles;
  kernel_of(cell.kind)<<<blocks, kBlockThreads, kSharedBytes, stream>>>(params);
  return true;
}

}  // namespace
}  // namespace tch_extension

// Starts nothing if H is not a whole number of tiles, if bulk copies cannot access a matrix, or if
// the code for the current device has no such kernel.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_cell_hopper_forward_cuda(
    const LltmCellFusedForward* cell, bool* is_started, cudaStream_t stream) {
  using namespace tch_extension;
  constexpr const char* kKernel = "lltm_cell_hopper_forward";
  *is_started = can(*cell) && start(*cell, stream);
  return *is_started ? launch_status(kKernel) : LaunchStatus{kKernel, nullptr};
}

// The number of multiprocessors of the current device if it has the kernel; 0 otherwise.
extern "C" int32_t tch_extension_lltm_cell_hopper_processors_cuda() {
  return tch_extension::processors();
}
