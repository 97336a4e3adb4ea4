// The forward of the grid; grid.h says how blocks share it.

#include "grid_launch.h"

namespace tch_extension {
namespace {

// Turns whose input gates are on their way, and steps whose messages' memory is.
constexpr int kAhead = 4;
// From as many sub-batches on, messages of the next are asked for while one is multiplied: of fewer, they are not there.
constexpr int kSubsAhead = 3;
[[maybe_unused]] constexpr int kNear = 4;  // unused where the kernel is empty

// Named barriers of the two buffers.
enum : int { kFull = 1, kFree = 3 };

template <typename T, int kColumns, int kVectors>
using GridProductForward =
    GridProduct<T, kGates * kColumns / kTile, kVectors, (kVectors * kColumns == 128 ? 8 : 0), kVectors,
                kVectors % 2 == 0 ? 2 : 1>;

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
__device__ __forceinline__ void load_weights(Product& product, const LltmGridForward& params, int first_column) {
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
        const uint4 of = operands<T>(valid ? load_vector<kWhole>(row + term) : uint4{});
        product.put_weight(vector, 0, tile, odd, of.x);
        product.put_weight(vector, 0, tile, 2 + odd, of.y);
        product.put_weight(vector, 1, tile, odd, of.z);
        product.put_weight(vector, 1, tile, 2 + odd, of.w);
      }
    }
    few_at_a_time();
  }
}

// Shared memory: partial sums of two turns; weights; of each thread that finishes, input gates of its next turns
// and c of each sub-batch, of two columns.
template <typename Product>
struct GridLayout {
  static constexpr int kMembers = Product::kTiles / kGates * 2 * kWarp;
  static constexpr int kOfMembers = kMembers * static_cast<int>(sizeof(float2));
  static constexpr int kWeights = 2 * Product::kBytesOfTurn;
  static constexpr int kRing = kWeights + Product::kBytesOfWeights;
  static constexpr int kState = kRing + kAhead * kGates * kOfMembers;
  // Threads that meet at a barrier.
  static constexpr int kMeeting = kProducers + kMembers;
};

// The products of a turn, again and again.
template <typename Product, int kColumns>
struct GridProducer {
  using T = typename Product::T;
  using Layout = GridLayout<Product>;

  __device__ __forceinline__ Source<T> source(const Turn& turn) const {
    const int row = place.first_row(turn.sub) + threadIdx.x % kWarp / 4;
    const bool valid = turn.step < place.steps && row < place.batch;
    const T* from = static_cast<const T*>(turn.step == 0 ? params.h0 : params.exchange);
    const uint32_t rows = (turn.step == 0 ? 0 : turn.step - 1) * place.batch + row;
    return {from + (valid ? rows * place.hidden + Product::first_term() : 0),
            valid ? place.hidden - Product::first_term() : 0};
  }

  __device__ __forceinline__ void run(int turns, unsigned char* memory) {
    Product product(memory + Layout::kWeights);
    const bool whole = reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 &&
                       params.weight_stride % kLanesOf16Bytes<T> == 0;
    whole ? load_weights<true>(product, params, place.first_column)
          : load_weights<false>(product, params, place.first_column);
    const bool ahead = place.subs >= kSubsAhead;
    Turn turn = {};
    Source<T> here = source(turn);
    product.begin(here);
    for (int done = 0; done < turns; ++done) {
      const bool are_messages = turn.step > 0;
      turn.advance(place.subs);
      const Source<T> next = source(turn);
      product.multiply(here, next, are_messages, ahead);
      const int buffer = done % 2;
      if (done > 1) barrier_of(kFree + buffer, Layout::kMeeting);
      product.write(memory + buffer * Product::kBytesOfTurn);
      arrive_at(kFull + buffer, Layout::kMeeting);
      here = next;
      if (!ahead) product.begin(here);
    }
  }

  const LltmGridForward& params;
  const GridPlace<kColumns>& place;
};

// What is behind the products, of two columns of a row: sums, gates and states.
template <typename S, typename Product, int kColumns>
struct GridFinisher {
  using T = typename Product::T;
  using Fast = std::conditional_t<std::is_same_v<T, float>, Tf32, T>;
  using Layout = GridLayout<Product>;
  static constexpr int kMembers = Layout::kMembers;

  __device__ __forceinline__ GridFinisher(const LltmGridForward& p, const GridPlace<kColumns>& at,
                                          unsigned char* shared, float2* of_bias)
      : params(p), place(at), seat(threadIdx.x - kProducers), memory(shared), bias(of_bias + threadIdx.x - kProducers) {
    column = place.first_column + seat.column;
    auto mine = [&](int offset) {
      return reinterpret_cast<float2*>(memory + offset) + (threadIdx.x - kProducers);
    };
    ring = mine(Layout::kRing);
    state = mine(Layout::kState);
  }

  __device__ __forceinline__ bool is_valid(int sub) const {
    return column < place.hidden && place.first_row(sub) + seat.row < place.batch;
  }
  // The row among those of all steps.
  __device__ __forceinline__ uint32_t row_of(const Turn& turn) const {
    return turn.step * place.batch + place.first_row(turn.sub) + seat.row;
  }

  __device__ __forceinline__ void fetch(int slot, const Turn& turn) {
    const bool wanted = turn.step < place.steps && is_valid(turn.sub);
    const float* from = static_cast<const float*>(params.input_gates) +
                        (wanted ? row_of(turn) * (kGates * place.hidden) + column : 0);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      copy_async(ring + (slot * kGates + gate) * kMembers,
                 reinterpret_cast<const float2*>(from + (wanted ? gate * place.hidden : 0)), wanted);
    }
    commit_copies();
  }

  // Of c and the bias, which may begin anywhere.
  __device__ __forceinline__ void begin() {
    const bool has_bias = params.bias != nullptr && column < place.hidden;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const float* from = static_cast<const float*>(params.bias) + gate * place.hidden + column;
      bias[gate * kMembers] = has_bias ? make_float2(from[0], from[1]) : float2{};
    }
    for (int sub = 0; sub < place.subs; ++sub) {
      const S* from = static_cast<const S*>(params.c0) + row_of({0, sub}) * place.hidden + column;
      state[sub * kMembers] = is_valid(sub)
                                  ? make_float2(static_cast<float>(from[0]), static_cast<float>(from[1]))
                                  : float2{};
    }
  }

  __device__ __forceinline__ void run(int turns) {
    Turn fetched = {}, turn = {};
    for (int done = 0; done < kAhead; ++done, fetched.advance(place.subs)) fetch(done, fetched);
    begin();
    for (int done = 0; done < turns; ++done) {
      float2 gates[kGates];
      const int slot = done % kAhead, buffer = done % 2;
      wait_for_copies<kAhead - 1>();
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const float2 input = ring[(slot * kGates + gate) * kMembers], of_bias = bias[gate * kMembers];
        gates[gate] = make_float2(input.x + of_bias.x, input.y + of_bias.y);
      }
      barrier_of(kFull + buffer, Layout::kMeeting);
      const unsigned char* found = memory + buffer * Product::kBytesOfTurn + seat.find_at;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const float2 sum = sum_of_parts<Product>(found + gate * (Product::kBytesOfWarp / kGates));
        gates[gate].x += sum.x;
        gates[gate].y += sum.y;
      }
      if (done + 2 < turns) arrive_at(kFree + buffer, Layout::kMeeting);
      finish(turn, gates);
      fetch(slot, fetched);
      fetched.advance(place.subs);
      turn.advance(place.subs);
    }
    if (params.c_stride != 0) return;
    for (int sub = 0; sub < place.subs; ++sub) {
      if (is_valid(sub)) store_c({0, sub}, state[sub * kMembers]);
    }
  }

  __device__ __forceinline__ void store_c(const Turn& turn, const float2& c) {
    store_two(static_cast<S*>(params.c) + row_of(turn) * place.hidden + column, c.x, c.y);
  }

  __device__ __forceinline__ void finish(const Turn& turn, const float2 (&gates)[kGates]) {
    const bool valid = is_valid(turn.sub);
    float2 i, o, h, c = state[turn.sub * kMembers];
    auto step = [](float of_i, float of_o, float of_g, float& i, float& o, float& c) {
      i = Activation<Fast, float>::of_gate(of_i);
      o = Activation<Fast, float>::of_gate(of_o);
      c += Activation<Fast, float>::of_candidate(of_g) * i;
      return Activation<Fast, float>::of_c(c) * o;
    };
    h.x = step(gates[0].x, gates[1].x, gates[2].x, i.x, o.x, c.x);
    h.y = step(gates[0].y, gates[1].y, gates[2].y, i.y, o.y, c.y);
    const uint32_t at = row_of(turn) * place.hidden + column;
    if (valid) send_two(static_cast<T*>(params.exchange) + at, h.x, h.y);
    state[turn.sub * kMembers] = c;
    if (!valid) return;
    if constexpr (!std::is_same_v<S, T>) store_two(static_cast<S*>(params.output) + at, h.x, h.y);
    if (params.c_stride != 0) store_c(turn, c);
    if (params.activations != nullptr) {
      S* activations = static_cast<S*>(params.activations) + row_of(turn) * (kGates * place.hidden) + column;
      store_two(activations, i.x, i.y);
      store_two(activations + place.hidden, o.x, o.y);
      store_two(activations + 2 * place.hidden, gates[2].x, gates[2].y);
    }
    // By then it may have left the L2 cache, and readers would wait for the memory.
    if (threadIdx.x % kWarp < 4 && turn.step + kNear < place.steps) {
      prefetch(static_cast<const T*>(params.exchange) + at +
               static_cast<uint32_t>(kNear * place.batch) * place.hidden);
    }
  }

  const LltmGridForward& params;
  const GridPlace<kColumns>& place;
  const Seat seat;
  unsigned char* memory;
  float2* bias;
  int column;
  float2* ring;
  float2* state;
};

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename Product, int kColumns>
__global__ void __launch_bounds__(kGridThreads, 1)
    lltm_grid_forward(const __grid_constant__ LltmGridForward params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) unsigned char grid_shared[];
  __shared__ float2 bias[kGates * GridLayout<Product>::kMembers];
  const GridPlace<kColumns> place(params);
  const int turns = place.steps * place.subs;
  if (threadIdx.x < kProducers) {
    take_registers<kProducerRegisters>();
    GridProducer<Product, kColumns>{params, place}.run(turns, grid_shared);
  } else {
    leave_registers<kFinisherRegisters>();
    if (threadIdx.x < GridLayout<Product>::kMeeting) {
      GridFinisher<S, Product, kColumns>(params, place, grid_shared, bias).run(turns);
    }
  }
#endif
}

template <typename S, typename T, int kColumns, int kVectors>
GridStatus start(const LltmGridForward& params, cudaStream_t stream) {
  using Product = GridProductForward<T, kColumns, kVectors>;
  using Layout = GridLayout<Product>;
  const int bytes = Layout::kState + subs_of(params) * Layout::kOfMembers;
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return start_grid<lltm_grid_forward<S, Product, kColumns>, kGridThreads>(params, bytes, params.exchange,
                                                                           size, stream);
}

struct GridForward {
  template <typename S, typename T>
  const char* run() const {
    if constexpr (sizeof(T) > 4) {
      return kNoKernel;
    } else {
      const int64_t terms = kWarps * kSpan<T>;
      const GridStatus status = start_of<S, T>((params.hidden + terms - 1) / terms);
      *fits = status.fits;
      return status.error;
    }
  }

  // With as many vectors of a row for each warp, or more.
  template <typename S, typename T>
  GridStatus start_of(int64_t vectors) const {
    switch (params.columns * 16 + vectors) {
      case 32 * 16 + 1:
      case 32 * 16 + 2:
        return start<S, T, 32, 2>(params, stream);
      case 32 * 16 + 3:
        return start<S, T, 32, 3>(params, stream);
      case 32 * 16 + 4:
        return start<S, T, 32, 4>(params, stream);
      case 16 * 16 + 1:
      case 16 * 16 + 2:
        return start<S, T, 16, 2>(params, stream);
      case 16 * 16 + 3:
        return start<S, T, 16, 3>(params, stream);
      case 16 * 16 + 4:
        return start<S, T, 16, 4>(params, stream);
      case 16 * 16 + 5:
      case 16 * 16 + 6:
        return start<S, T, 16, 6>(params, stream);
      case 16 * 16 + 7:
      case 16 * 16 + 8:
        return start<S, T, 16, 8>(params, stream);
      default:
        return {true, kNoKernel};
    }
  }

  const LltmGridForward& params;
  bool* fits;
  cudaStream_t stream;
};

}  // namespace
}  // namespace tch_extension

// `fits` is false where not all blocks can run at once: then no kernel was started.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_forward_cuda(const LltmGridForward* params,
                                                                            bool* fits, cudaStream_t stream) {
  using namespace tch_extension;
  return {"lltm_grid_forward",
          for_kinds(params->kind, params->product_kind, GridForward{*params, fits, stream})};
}

// Of the current device, which `device` has to be: how many blocks run at the same time; 0 where the kernels
// cannot.
extern "C" const char* tch_extension_lltm_grid_device(int32_t device, int64_t* blocks) {
  using namespace tch_extension;
  using Product = GridProductForward<__half, 32, 4>;
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
  constexpr size_t kBytes = GridLayout<Product>::kState;
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
