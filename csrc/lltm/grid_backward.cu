// The backward of the grid; grid.h says how blocks share it. A block makes the gradients for h of its own
// columns from those for all gates of the step behind, which are the messages.

#include "grid_launch.h"

namespace tch_extension {
namespace {

constexpr int kBlock = kWarps * kWarp;

// Steps whose messages' memory is on its way, and turns of a thread whose saved values are.
[[maybe_unused]] constexpr int kNear = 2;  // unused where the kernel is empty
constexpr int kAhead = 2;
// From as many sub-batches on, messages of the next are asked for while one is multiplied: of fewer, they are
// not sent before these are read.
[[maybe_unused]] constexpr int kSubsAhead = 2;

// W_hᵀ.
template <typename Product>
__device__ __forceinline__ void load_weights(Product& product, const LltmGridBackward& params,
                                             int first_column) {
  using T = typename Product::T;
  const T* weight = static_cast<const T*>(params.weight);
  const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
  auto word = [&](int term, int column) {
    if (term >= kGates * hidden || column >= hidden) return 0u;
    const T* at = weight + static_cast<int64_t>(term) * params.weight_stride + column;
    if constexpr (sizeof(T) == 2) {
      return bits_of(at[0]) | bits_of(at[params.weight_stride]) << 16;
    } else {
      return to_tf32(__float_as_uint(at[0]));
    }
  };
#pragma unroll
  for (int fragment = 0; fragment < Product::kFragments; ++fragment) {
    const int tile = fragment % Product::kTiles, half = fragment / Product::kTiles % 2;
    const int vector = fragment / Product::kTiles / 2;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int term = product.first_term() + vector * Product::kStride +
                       (half * 2 + part / 2) * (4 / static_cast<int>(sizeof(T)));
      const int column = first_column + tile * kTile + lane / 4 * 2 + part % 2;
      product.put_weight(vector, half, tile, part, word(term, column));
    }
    if (fragment % 4 == 3) few_at_a_time();
  }
}

// Shared memory: partial sums of two turns; weights; of each thread, saved values of its next turns; gradients
// for c of each sub-batch, of two columns a thread.
template <typename S, typename Product>
struct GridLayoutBack {
  // Of the largest weights there is no place beside a second buffer.
  static constexpr int kBuffers = Product::kShared > 40 ? 1 : 2;
  static constexpr int kWeights = kBuffers * Product::kBytesOfTurn;
  // Of a thread, kSaved times two values of each of its next turns: were they on their way to registers, its
  // messages would wait for them.
  static constexpr int kSaved = 5;
  static constexpr int kRing = kWeights + Product::kBytesOfWeights;
  static constexpr int kState = kRing + kAhead * kSaved * kBlock * static_cast<int>(sizeof(BitsOfTwo<S>));
  // Threads that finish a sub-batch: the others begin with the next.
  static constexpr int kFinishing = 2 * Product::kTiles * kWarp;
  static constexpr int kTeams = kBlock / kFinishing;
  static constexpr int kBytesOfState = kFinishing * static_cast<int>(sizeof(float2));
};

// What is behind the products: teams of warps finish sub-batches in turn.
template <typename S, typename Product>
struct GridFinisherBack {
  using T = typename Product::T;
  using Fast = std::conditional_t<std::is_same_v<T, float>, Tf32, T>;
  using Layout = GridLayoutBack<S, Product>;
  using Place = GridPlace<Product::kTiles * kTile>;
  using Bits = BitsOfTwo<S>;
  enum : int { kTeams = Layout::kTeams };

  __device__ __forceinline__ GridFinisherBack(const LltmGridBackward& p, const Place& at, unsigned char* memory)
      : params(p), place(at), team(threadIdx.x / Layout::kFinishing), seat(threadIdx.x % Layout::kFinishing) {
    column = place.first_column + seat.column;
    ring = reinterpret_cast<Bits*>(memory + Layout::kRing) + threadIdx.x;
    state = reinterpret_cast<float2*>(memory + Layout::kState) + threadIdx.x % Layout::kFinishing;
    for (int sub = team; sub < place.subs; sub += kTeams) {
      const float* from = static_cast<const float*>(params.grad_c) + at_first(sub);
      of_c(sub) = is_valid(sub) ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
    }
    fetched = {0, team};
    if (team >= place.subs) return;
    for (int turn = 0; turn < kAhead; ++turn) fetch();
  }

  __device__ __forceinline__ bool is_valid(int sub) const {
    return place.first_row(sub) + seat.row < place.batch && column < place.hidden;
  }
  // Of [B, H].
  __device__ __forceinline__ uint32_t at_first(int sub) const {
    return static_cast<uint32_t>(place.first_row(sub) + seat.row) * place.hidden + column;
  }
  // Of [T, B, H]; the last step is the first turn's.
  __device__ __forceinline__ uint32_t at_turn(const Turn& turn) const {
    return (place.steps - 1 - turn.step) * (static_cast<uint32_t>(place.batch) * place.hidden) +
           at_first(turn.sub);
  }
  // Of [T, B, 3H], from that of [T, B, H].
  __device__ __forceinline__ uint32_t at_gates(uint32_t at) const { return kGates * at - 2 * column; }
  __device__ __forceinline__ float2& of_c(int sub) const { return state[sub * Layout::kFinishing]; }

  __device__ __forceinline__ void fetch() {
    const bool wanted = fetched.step < place.steps && is_valid(fetched.sub);
    const uint32_t at = wanted ? at_turn(fetched) : 0, of_gates = wanted ? at_gates(at) : 0;
    Bits* to = ring + slot * (Layout::kSaved * kBlock);
    auto copy = [&](int index, const void* from, uint32_t at) {
      const S* place = static_cast<const S*>(from != nullptr ? from : params.c) + at;
      copy_async(to + index * kBlock, reinterpret_cast<const Bits*>(place), wanted && from != nullptr);
    };
    copy(0, params.grad_output, at);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      copy(1 + gate, params.activations, of_gates + (wanted ? gate * place.hidden : 0));
    }
    copy(4, params.c, at);
    commit_copies();
    slot = (slot + 1) % kAhead;
    fetched.sub += kTeams;
    if (fetched.sub >= place.subs) fetched = {fetched.step + 1, team};
  }

  __device__ __forceinline__ bool has(const Turn& turn) const { return turn.sub % kTeams == team; }

  __device__ __forceinline__ float2 read(const unsigned char* partials) const {
    return sum_of_parts<Product>(partials + seat.find_at);
  }

  __device__ __forceinline__ void finish(const Turn& turn, float2 grad_h) {
    const bool valid = is_valid(turn.sub);
    float2* behind = reinterpret_cast<float2*>(static_cast<float*>(params.grad_h) + at_first(turn.sub));
    if (turn.step == 0 && valid) grad_h = *behind;
    if (turn.step < place.steps) {
      go_back(turn, grad_h, valid);
    } else if (valid) {
      *behind = grad_h;
    }
  }

  __device__ __forceinline__ void go_back(const Turn& turn, float2 grad_h, bool valid) {
    float2 grad_c = of_c(turn.sub);
    float grads[kGates][2];
    wait_for_copies<kAhead - 1>();
    auto saved = [&](int index) { return values_of<S>(ring[(slot * Layout::kSaved + index) * kBlock]); };
    const float2 grad_output = saved(0), i = saved(1), o = saved(2), g = saved(3), c = saved(4);
    auto of_one = [&](int at, float grad_h, float& grad_c, float i, float o, float g, float c) {
      const float tanh_c = Activation<Fast, float>::of_c(c);
      grad_c += grad_h * (o * tanh_grad(tanh_c));
      grads[0][at] = grad_c * (Activation<Fast, float>::of_candidate(g) * sigmoid_grad(i));
      grads[1][at] = grad_h * (tanh_c * sigmoid_grad(o));
      grads[2][at] = grad_c * (i * Activation<Fast, float>::candidate_grad(g));
    };
    of_one(0, grad_h.x + grad_output.x, grad_c.x, i.x, o.x, g.x, c.x);
    of_one(1, grad_h.y + grad_output.y, grad_c.y, i.y, o.y, g.y, c.y);
    if (valid) {
      T* to = static_cast<T*>(params.grad_gates) + at_gates(at_turn(turn));
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        send_two(to + gate * place.hidden, grads[gate][0], grads[gate][1]);
      }
      // By then it may have left the L2 cache, and readers would wait for the memory.
      if (threadIdx.x % kWarp < 4 && turn.step + kNear < place.steps) {
        const int64_t near = static_cast<int64_t>(kNear * kGates) * place.batch * place.hidden;
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) prefetch(to + gate * place.hidden - near);
      }
    }
    of_c(turn.sub) = grad_c;
    fetch();
  }

  __device__ __forceinline__ void end() const {
    for (int sub = team; sub < place.subs; sub += kTeams) {
      float* to = static_cast<float*>(params.grad_c) + at_first(sub);
      if (is_valid(sub)) *reinterpret_cast<float2*>(to) = of_c(sub);
    }
  }

  const LltmGridBackward& params;
  const Place& place;
  const int team;
  const Seat seat;
  int column, slot = 0;
  Bits* ring;
  float2* state;
  Turn fetched;
};

// Of the step behind, whose gates are the terms.
template <typename Product, typename Place>
__device__ __forceinline__ Source<typename Product::T> source_of(const LltmGridBackward& params,
                                                                 const Place& place, const Turn& turn) {
  const int row = place.first_row(turn.sub) + threadIdx.x % kWarp / 4, first = Product::first_term();
  const bool valid = turn.step > 0 && turn.step <= place.steps && row < place.batch;
  const uint32_t rows = (place.steps - turn.step) * place.batch + row, size = kGates * place.hidden;
  const auto* gates = static_cast<const typename Product::T*>(params.grad_gates);
  return {gates + (valid ? rows * size + first : 0), valid ? static_cast<int>(size) - first : 0};
}

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename Product>
__global__ void __launch_bounds__(kBlock, 1)
    lltm_grid_backward(const __grid_constant__ LltmGridBackward params) {
#if __CUDA_ARCH__ >= 900
  using T = typename Product::T;
  using Layout = GridLayoutBack<S, Product>;
  enum : int { kRead = 1 };
  extern __shared__ __align__(128) unsigned char grid_shared_back[];
  const GridPlace<Product::kTiles * kTile> place(params);
  GridFinisherBack<S, Product> finisher(params, place, grid_shared_back);
  Product product(grid_shared_back + Layout::kWeights);
  load_weights(product, params, place.first_column);
  const bool ahead = place.subs >= kSubsAhead;
  const int last = params.needs_grad_h0 ? place.steps : place.steps - 1;
  Turn turn = {};
  Source<T> here = {};
  for (int done = 0; turn.step <= last; ++done) {
    unsigned char* partials = grid_shared_back + done % Layout::kBuffers * Product::kBytesOfTurn;
    const Turn now = turn;
    turn.advance(place.subs);
    const Source<T> next = source_of<Product>(params, place, turn);
    float2 grad_h = {0, 0};
    if (now.step > 0) {
      product.multiply(here, next, true, ahead);
      if (Layout::kBuffers == 1 && done > place.subs) barrier_of(kRead, 2 * kBlock);
      product.write(partials);
      __syncthreads();
      if (finisher.has(now)) grad_h = finisher.read(partials);
      if (Layout::kBuffers == 1) arrive_at(kRead, 2 * kBlock);
    }
    if (finisher.has(now)) finisher.finish(now, grad_h);
    here = next;
    if (!ahead || now.step == 0) product.begin(here);
  }
  finisher.end();
#endif
}

// In as many blocks' shared memory as there is.
template <typename S, typename T, int kTiles, int kVectors, int kShared, int kRing, int kGroup>
GridStatus start(const LltmGridBackward& params, cudaStream_t stream) {
  using Product = GridProduct<T, kTiles, kVectors, kShared, kRing, kGroup>;
  using Layout = GridLayoutBack<S, Product>;
  const int bytes = Layout::kState + subs_of(params) * Layout::kBytesOfState;
  const auto size = static_cast<size_t>(params.steps * params.batch * kGates * params.hidden) * sizeof(T);
  return start_grid<lltm_grid_backward<S, Product>, kBlock>(params, bytes, params.grad_gates, size, stream);
}

struct GridBackward {
  template <typename S, typename T>
  const char* run() const {
    if constexpr (sizeof(T) > 4) {
      return kNoKernel;
    } else {
      const int64_t terms = kWarps * kSpan<T>;
      const GridStatus status = start_of<S, T>((kGates * params.hidden + terms - 1) / terms);
      *fits = status.fits;
      return status.error;
    }
  }

  // With as many vectors of a row for each lane, or more.
  template <typename S, typename T>
  GridStatus start_of(int64_t vectors) const {
    if (params.columns == 32) {
      if (vectors <= 6) return start<S, T, 2, 6, 0, 6, 3>(params, stream);
      if (vectors <= 9) return start<S, T, 2, 9, 18, 9, 3>(params, stream);
      if (vectors <= 12) return start<S, T, 2, 12, 20, 12, 3>(params, stream);
    } else {
      if (vectors <= 6) return start<S, T, 1, 6, 0, 6, 3>(params, stream);
      if (vectors <= 9) return start<S, T, 1, 9, 0, 9, 3>(params, stream);
      if (vectors <= 12) return start<S, T, 1, 12, 0, 12, 6>(params, stream);
      if (vectors <= 18) return start<S, T, 1, 18, 0, 9, 3>(params, stream);
      if (vectors <= 24) return start<S, T, 1, 24, 20, 12, 3>(params, stream);
    }
    return {true, kNoKernel};
  }

  const LltmGridBackward& params;
  bool* fits;
  cudaStream_t stream;
};

}  // namespace
}  // namespace tch_extension

// `fits` as in the forward.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_backward_cuda(const LltmGridBackward* params,
                                                                             bool* fits,
                                                                             cudaStream_t stream) {
  using namespace tch_extension;
  return {"lltm_grid_backward",
          for_kinds(params->kind, params->product_kind, GridBackward{*params, fits, stream})};
}
