// The forward of the grid; grid.h says how blocks share it.

#include "grid_launch.h"

namespace tch_extension {
namespace {

// Turns whose input gates are on their way, and steps whose messages' memory is.
constexpr int kAhead = 3;
// From as many sub-batches on, messages of the next are asked for while one is multiplied: of fewer, they are
// not there.
[[maybe_unused]] constexpr int kSubsAhead = 3;
[[maybe_unused]] constexpr int kNear = 4;  // unused where the kernel is empty

// All of a turn's messages are asked for at once.
template <typename T, int kColumns, int kVectors, int kShared, int kGroup>
using GridProductForward = GridProduct<T, kGates * kColumns / kTile, kVectors, kShared, kVectors, kGroup>;

// A row of W may begin anywhere.
template <bool kWhole, typename T>
__device__ __forceinline__ uint4 load_vector(const T* from) {
  if constexpr (kWhole) return *reinterpret_cast<const uint4*>(from);
  uint4 vector;
  auto* values = reinterpret_cast<T*>(&vector);
#pragma unroll
  for (int at = 0; at < kLanesOf16Bytes<T>; ++at) values[at] = from[at];
  return vector;
}

// W_h: of each gate a row of the tile for each of the block's columns.
template <bool kWhole, typename Product>
__device__ __forceinline__ void load_weights(Product& product, const LltmGridForward& params,
                                             int first_column) {
  using T = typename Product::T;
  constexpr int kOfGate = Product::kTiles / kGates;
  const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
#pragma unroll
  for (int tile = 0; tile < Product::kTiles; ++tile) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int column = first_column + tile % kOfGate * kTile + lane / 4 * 2 + odd;
      const T* row = static_cast<const T*>(params.weight) +
                     static_cast<int64_t>(tile / kOfGate * hidden + column) * params.weight_stride;
#pragma unroll
      for (int vector = 0; vector < Product::kVectors; ++vector) {
        const int term = product.first_term() + vector * Product::kStride;
        const bool valid = column < hidden && term < hidden;
        const uint4 of = valid ? load_vector<kWhole>(row + term) : uint4{};
        product.put_weight(vector, 0, tile, odd, of.x);
        product.put_weight(vector, 0, tile, 2 + odd, of.y);
        product.put_weight(vector, 1, tile, odd, of.z);
        product.put_weight(vector, 1, tile, 2 + odd, of.w);
      }
    }
    few_at_a_time();
  }
}

// Shared memory behind that of the product: of each thread that finishes, input gates of its next turns and c
// of each of its sub-batches, of two columns.
template <typename Product, int kColumns>
struct GridLayout {
  using Teams = GridTeams<Product, kColumns>;
  static constexpr int kOfAll = kFinishers * static_cast<int>(sizeof(float2));
  static constexpr int kRing = Teams::kEnd;
  static constexpr int kState = kRing + kAhead * kGates * kOfAll;
  static int bytes(int subs) { return kState + (subs + Teams::kTeams - 1) / Teams::kTeams * kOfAll; }
};

// What each thread that finishes has of its columns.
struct OfColumns {
  float2 bias[kGates * kFinishers];
  float2 scales[kGates * kFinishers];
};

// What is behind the products: gates and states.
template <typename S, typename Product, int kColumns>
struct GridFinisher : GridMember<Product, kColumns> {
  using T = typename Product::T;
  // Whether it may be multiplied instead of float.
  static constexpr bool kMayScale = std::is_same_v<S, float> && std::is_same_v<T, __half>;
  using Layout = GridLayout<Product, kColumns>;
  using Member = GridMember<Product, kColumns>;
  using Member::at_first, Member::column, Member::index, Member::is_valid, Member::place;

  __device__ __forceinline__ GridFinisher(const LltmGridForward& p, const GridPlace<kColumns>& of_block,
                                          unsigned char* memory, OfColumns& columns)
      : Member(of_block, memory), params(p), bias(columns.bias + index), scales(columns.scales + index) {
    ring = reinterpret_cast<float2*>(memory + Layout::kRing) + index;
    state = reinterpret_cast<float2*>(memory + Layout::kState) + index;
  }

  // Of [T, B, H].
  __device__ __forceinline__ uint32_t at_turn(const Turn& turn) const {
    return turn.step * (static_cast<uint32_t>(place.batch) * place.hidden) + at_first(turn.sub);
  }
  // Of [T, B, 3H], from that of [T, B, H].
  __device__ __forceinline__ uint32_t at_gates(uint32_t at) const { return kGates * at - 2 * column; }
  __device__ __forceinline__ float2& c_of(int sub) const {
    return state[sub / Layout::Teams::kTeams * kFinishers];
  }

  __device__ __forceinline__ void fetch() {
    const bool wanted = fetched.step < place.steps && is_valid(fetched.sub);
    const float* from =
        static_cast<const float*>(params.input_gates) + (wanted ? at_gates(at_turn(fetched)) : 0);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      copy_async(ring + (slot * kGates + gate) * kFinishers,
                 reinterpret_cast<const float2*>(from + (wanted ? gate * place.hidden : 0)), wanted);
    }
    commit_copies();
    slot = (slot + 1) % kAhead;
    this->advance(fetched);
  }

  // Of a row that may begin anywhere.
  __device__ __forceinline__ void begin_columns(float2* to, const float* row, float otherwise) {
    const bool is_there = row != nullptr && column < place.hidden;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float* from = row + gate * place.hidden + column;
      to[gate * kFinishers] =
          is_there ? make_float2(from[0], from[1]) : make_float2(otherwise, otherwise);
    }
  }

  __device__ __forceinline__ void begin() {
    begin_columns(bias, static_cast<const float*>(params.bias), 0);
    if constexpr (kMayScale) begin_columns(scales, params.scales, 1);
    for (int sub = this->team; sub < place.subs; sub += Layout::Teams::kTeams) {
      const S* from = static_cast<const S*>(params.c0) + at_first(sub);
      c_of(sub) =
          is_valid(sub) ? make_float2(static_cast<float>(from[0]), static_cast<float>(from[1])) : float2{};
    }
  }

  __device__ __forceinline__ void run(int turns) {
    fetched = this->first_turn();
    if (fetched.sub >= place.subs) return;
    for (int done = 0; done < kAhead; ++done) fetch();
    begin();
    for (Turn turn = this->first_turn(); turn.step < place.steps; this->advance(turn)) {
      float2 gates[kGates], sums[kGates];
      wait_for_copies<kAhead - 1>();
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const float2 input = ring[(slot * kGates + gate) * kFinishers], of_bias = bias[gate * kFinishers];
        gates[gate] = make_float2(input.x + of_bias.x, input.y + of_bias.y);
      }
      this->take(sums, turn.step * place.subs + turn.sub, turns);
      if constexpr (kMayScale) scale(sums, turn);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        gates[gate].x += sums[gate].x;
        gates[gate].y += sums[gate].y;
      }
      finish(turn, gates);
      fetch();
    }
    if (params.c_stride != 0) return;
    for (int sub = this->team; sub < place.subs; sub += Layout::Teams::kTeams) {
      if (is_valid(sub)) store_two(static_cast<S*>(params.c) + at_first(sub), c_of(sub).x, c_of(sub).y);
    }
  }

  // Of what a message is, as a number.
  __device__ __forceinline__ float message_scale() const {
    return kMayScale && params.scales != nullptr ? kMessageScale : 1;
  }

  // What was multiplied as halves.
  __device__ __forceinline__ void scale(float2 (&sums)[kGates], const Turn& turn) const {
    float of_h = 1 / message_scale();
    if (turn.step == 0 && params.scales != nullptr && is_valid(turn.sub)) {
      of_h = params.h0_scales[place.first_row(turn.sub) + this->row];
    }
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float2 of = scales[gate * kFinishers];
      sums[gate].x *= of_h * of.x;
      sums[gate].y *= of_h * of.y;
    }
  }

  __device__ __forceinline__ void finish(const Turn& turn, const float2 (&gates)[kGates]) {
    const bool valid = is_valid(turn.sub);
    const uint32_t at = at_turn(turn);
    float2 i, o, h, c = c_of(turn.sub);
    auto step = [](float of_i, float of_o, float of_g, float& i, float& o, float& c) {
      i = Activation<T, float>::of_gate(of_i);
      o = Activation<T, float>::of_gate(of_o);
      c += Activation<T, float>::of_candidate(of_g) * i;
      return Activation<T, float>::of_c(c) * o;
    };
    h.x = step(gates[0].x, gates[1].x, gates[2].x, i.x, o.x, c.x);
    h.y = step(gates[0].y, gates[1].y, gates[2].y, i.y, o.y, c.y);
    const float of = message_scale();
    if (valid) send_two(static_cast<T*>(params.exchange) + at, h.x * of, h.y * of);
    c_of(turn.sub) = c;
    if (!valid) return;
    if constexpr (!std::is_same_v<S, T>) store_two(static_cast<S*>(params.output) + at, h.x, h.y);
    if (params.c_stride != 0) store_two(static_cast<S*>(params.c) + at, c.x, c.y);
    if (params.activations != nullptr) {
      S* activations = static_cast<S*>(params.activations) + at_gates(at);
      store_two(activations, i.x, i.y);
      store_two(activations + place.hidden, o.x, o.y);
      store_two(activations + 2 * place.hidden, gates[2].x, gates[2].y);
    }
    // By then it may have left the L2 cache, and readers would wait for the memory.
    if (this->is_first() && turn.step + kNear < place.steps) {
      prefetch(static_cast<const T*>(params.exchange) + at +
               static_cast<uint32_t>(kNear * place.batch) * place.hidden);
    }
  }

  const LltmGridForward& params;
  float2* bias;
  float2* scales;
  float2* ring;
  float2* state;
  Turn fetched;
  int slot = 0;
};

// Of h of the step before, or h0.
template <typename Product, int kColumns>
__device__ __forceinline__ Source<typename Product::T> source_of(const LltmGridForward& params,
                                                                 const GridPlace<kColumns>& place,
                                                                 const Turn& turn) {
  const int row = place.first_row(turn.sub) + threadIdx.x % kWarp / 4, first = Product::first_term();
  const bool valid = turn.step < place.steps && row < place.batch;
  const void* from = turn.step == 0 ? params.h0 : params.exchange;
  const uint32_t rows = (turn.step == 0 ? 0 : turn.step - 1) * place.batch + row;
  return {static_cast<const typename Product::T*>(from) + (valid ? rows * place.hidden + first : 0),
          valid ? place.hidden - first : 0};
}

template <typename Product, int kColumns>
__device__ __forceinline__ void produce(const LltmGridForward& params, const GridPlace<kColumns>& place,
                                        int turns, unsigned char* memory) {
  constexpr int kVector = kLanesOf16Bytes<typename Product::T>;
  Product product(memory + GridTeams<Product, kColumns>::kWeights);
  const bool whole =
      reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 && params.weight_stride % kVector == 0;
  whole ? load_weights<true>(product, params, place.first_column)
        : load_weights<false>(product, params, place.first_column);
  auto source = [&](const Turn& turn) { return source_of<Product>(params, place, turn); };
  multiply_turns(product, place, source, Turn{}, turns, place.subs >= kSubsAhead, memory);
}

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename Product, int kColumns>
__global__ void __launch_bounds__(kGridThreads, 1)
    lltm_grid_forward(const __grid_constant__ LltmGridForward params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char grid_shared[];
  __shared__ OfColumns columns;
  const GridPlace<kColumns> place(params);
  const int turns = place.steps * place.subs;
  if (threadIdx.x < kProducers) {
    take_registers<kProducerRegisters>();
    produce<Product>(params, place, turns, grid_shared);
  } else {
    leave_registers<kFinisherRegisters>();
    GridFinisher<S, Product, kColumns>(params, place, grid_shared, columns).run(turns);
  }
#endif
}

struct GridForward {
  template <typename S, int kColumns, typename Product>
  static GridStatus start(const LltmGridForward& params, cudaStream_t stream) {
    using T = typename Product::T;
    const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
    return start_grid<lltm_grid_forward<S, Product, kColumns>, kGridThreads>(
        params, GridLayout<Product, kColumns>::bytes(subs_of(params)), params.exchange, size, stream);
  }

  template <typename S, int kColumns, typename T, int kVectors, int kShared, int kGroup>
  static GridStatus start_of(const LltmGridForward& params, cudaStream_t stream) {
    return start<S, kColumns, GridProductForward<T, kColumns, kVectors, kShared, kGroup>>(params, stream);
  }

  // With as many vectors of a row for each lane, or more.
  template <typename S, typename T>
  static GridStatus start(const LltmGridForward& params, int64_t vectors, cudaStream_t stream) {
    if (params.columns == 32) {
      if (vectors <= 2) return start_of<S, 32, T, 2, 0, 2>(params, stream);
      if (vectors <= 3) return start_of<S, 32, T, 3, 0, 3>(params, stream);
      if (vectors <= 4) return start_of<S, 32, T, 4, 12, 2>(params, stream);
    } else {
      if (vectors <= 3) return start_of<S, 16, T, 3, 0, 3>(params, stream);
      if (vectors <= 4) return start_of<S, 16, T, 4, 0, 2>(params, stream);
      if (vectors <= 6) return start_of<S, 16, T, 6, 0, 6>(params, stream);
      if (vectors <= 8) return start_of<S, 16, T, 8, 14, 8>(params, stream);
    }
    return {true, kNoKernel};
  }
};

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_forward_cuda(const LltmGridForward* params,
                                                                            bool* fits, cudaStream_t stream) {
  using namespace tch_extension;
  const GridCall<GridForward, LltmGridForward> call{*params, params->hidden, fits, stream};
  return {"lltm_grid_forward", for_kinds(params->kind, params->product_kind, call)};
}

// Of the current device, which `device` has to be: how many blocks run at the same time; 0 where the kernels
// cannot.
extern "C" const char* tch_extension_lltm_grid_device(int32_t device, int64_t* blocks) {
  using namespace tch_extension;
  using Product = GridProductForward<__half, 32, 4, 12, 2>;
  constexpr auto kLargest = lltm_grid_forward<__half, Product, 32>;
  int major = 0, cooperative = 0, processors = 0, of_one = 0;
  *blocks = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Measured nowhere else.
  if (major != 9 || cooperative == 0) return nullptr;
  cudaFuncAttributes code = {};
  error = cudaFuncGetAttributes(&code, kLargest);
  // What is compiled for any other architecture than Hopper's own is empty, and without its bias.
  if (error == cudaSuccess && code.sharedSizeBytes == 0) return nullptr;
  if (error == cudaSuccess) error = allow<kLargest>();
  constexpr size_t kBytes = GridLayout<Product, 32>::kState;
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kLargest, kGridThreads, kBytes);
  }
  if (error == cudaSuccess) {
    *blocks = of_one > 0 ? processors : 0;
    return nullptr;
  }
  // Whoever looks for a failure of a launch must not find one of a question.
  (void)cudaGetLastError();
  return nullptr;
}
