// The backward of the grid; grid.h says how blocks share it. A block makes the gradients for h of its own
// columns from those for all gates of the step behind, which are the messages.

#include "grid_launch.h"

namespace tch_extension {
namespace {

constexpr int kBlock = kWarps * kWarp;

// Steps whose messages' memory is on its way, and turns of a thread whose saved values are.
[[maybe_unused]] constexpr int kNear = 2;  // unused where the kernel is empty
constexpr int kAhead = 2;

// What is not sent yet: two values of a half kind are sent as one word, and those of no conversion are both
// all ones.
constexpr uint32_t kUnsent = ~0u;

template <typename T>
__device__ __forceinline__ void send_two(T* to, float first, float second) {
  auto store = [](void* to, uint32_t word, uint32_t not_a_number) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(word == kUnsent ? not_a_number : word)
                 : "memory");
  };
  if constexpr (sizeof(T) == 2) {
    store(to, bits_of(static_cast<T>(first)) | bits_of(static_cast<T>(second)) << 16, 0x7fff7fff);
  } else {
    store(to, __float_as_uint(first), 0x7fffffff);
    store(to + 1, __float_as_uint(second), 0x7fffffff);
  }
}

[[maybe_unused]] __device__ __forceinline__ bool is_unsent(const uint4& words) {
  return max(max(words.x, words.y), max(words.z, words.w)) == kUnsent;
}

template <typename T>
__device__ __forceinline__ void multiply_add_one(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  if constexpr (sizeof(T) == 2) {
    multiply_add<T>(sums, a, b0, b1);
  } else {
    multiply_add_tf32(sums, a, b0, b1);
  }
}

// W_hᵀ of a warp, as tensor cores take it: kTiles tiles of the block's columns, and of their rows kVectors
// vectors a lane, each for two instructions. In registers, but for the last kShared, for which there are none
// left: in shared memory, [warp, fragment, lane].
template <typename T, int kTiles, int kVectors, int kShared>
struct GridWeightsBack {
  static constexpr int kFragments = kVectors * 2 * kTiles;
  static constexpr int kInRegisters = kFragments - kShared;
  static constexpr int kBytes = kWarps * kShared * kWarp * static_cast<int>(sizeof(uint4));
  // Sums of a tile that are made side by side: one after the other they would wait for each instruction.
  static constexpr int kChains = kTiles < 4 ? 4 / kTiles : 1;

  // A tile's rows are its even columns first, so that a lane's sums are of neighbouring ones.
  __device__ void load(const LltmGridBackward& params, int first_column, int first_term,
                       unsigned char* memory) {
    const T* weight = static_cast<const T*>(params.weight);
    const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
    shared = reinterpret_cast<uint4*>(memory) + threadIdx.x / kWarp * (kShared * kWarp) + lane;
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
    for (int fragment = 0; fragment < kFragments; ++fragment) {
      uint32_t parts[4];
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int of_vector = fragment / kTiles % 2 * 2 + part / 2;
        const int term =
            first_term + fragment / (2 * kTiles) * kStride + of_vector * (4 / static_cast<int>(sizeof(T)));
        parts[part] = word(term, first_column + fragment % kTiles * kTile + lane / 4 * 2 + part % 2);
      }
      if (fragment < kInRegisters) {
#pragma unroll
        for (int part = 0; part < 4; ++part) weights[fragment][part] = parts[part];
      } else {
        shared[(fragment - kInRegisters) * kWarp] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
      }
      if (fragment % 4 == 3) few_at_a_time();
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kChains][kTiles][4], int vector,
                                           const uint4& b) const {
    const uint4 words = operands<T>(b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const int fragment = (vector * 2 + half) * kTiles + tile;
        auto& sum = sums[(vector * 2 + half) % kChains][tile];
        const uint32_t b0 = half == 0 ? words.x : words.z, b1 = half == 0 ? words.y : words.w;
        if (fragment < kInRegisters) {
          multiply_add_one<T>(sum, weights[fragment], b0, b1);
        } else {
          const uint4 a = shared[(fragment - kInRegisters) * kWarp];
          const uint32_t parts[4] = {a.x, a.y, a.z, a.w};
          multiply_add_one<T>(sum, parts, b0, b1);
        }
      }
    }
  }

  // From a vector of a warp to its next: the warps take vectors in turn.
  enum : int { kStride = kWarps * kSpan<T> };
  uint32_t weights[kInRegisters][4];
  uint4* shared;
};

// Shared memory: partial sums of two turns, [2, warp, tile, quad] of four; weights; gradients for c of each
// sub-batch, of two columns a thread.
template <typename Weights, int kTiles, int kBytesOfTwo>
struct GridLayoutBack {
  static constexpr int kOfTile = kWarp * static_cast<int>(sizeof(float4));
  static constexpr int kOfWarp = kTiles * kOfTile;
  static constexpr int kOfTurn = kWarps * kOfWarp;
  static constexpr int kWeights = 2 * kOfTurn;
  // Of a thread, kSaved times two values of each of its next turns: were they on their way to registers, its
  // messages would wait for them.
  static constexpr int kSaved = 5;
  static constexpr int kRing = kWeights + Weights::kBytes;
  static constexpr int kState = kRing + kAhead * kSaved * kBlock * kBytesOfTwo;
  // Threads that finish a sub-batch: the others begin with the next.
  static constexpr int kFinishing = 2 * kTiles * kWarp;
};

// Two values as they are in memory.
template <typename S>
using BitsOfTwo = std::conditional_t<sizeof(S) == 2, uint32_t, uint2>;

template <typename S>
__device__ __forceinline__ float2 values_of(const BitsOfTwo<S>& bits) {
  if constexpr (std::is_same_v<S, float>) {
    return {__uint_as_float(bits.x), __uint_as_float(bits.y)};
  } else {
    auto value = [](uint32_t half) {
      const auto narrow = static_cast<unsigned short>(half);
      if constexpr (std::is_same_v<S, __half>) return static_cast<float>(__ushort_as_half(narrow));
      if constexpr (!std::is_same_v<S, __half>) return static_cast<float>(__ushort_as_bfloat16(narrow));
    };
    return {value(bits), value(bits >> 16)};
  }
}

// S is the state's type; a lane has kChunk of its vectors on their way, and as many at hand. Indices are 32
// bits wide: longer sequences take another path.
template <typename S, typename T, int kTiles, int kVectors, int kShared, int kChunk>
__global__ void __launch_bounds__(kBlock, 1) lltm_grid_backward(const LltmGridBackward params) {
#if __CUDA_ARCH__ >= 900
  using std::tanh;
  using Weights = GridWeightsBack<T, kTiles, kVectors, kShared>;
  using Layout = GridLayoutBack<Weights, kTiles, sizeof(BitsOfTwo<S>)>;
  constexpr int kColumns = kTiles * kTile, kChunks = (kVectors + kChunk - 1) / kChunk;
  constexpr int kTeams = kBlock / Layout::kFinishing;
  extern __shared__ __align__(128) unsigned char grid_shared_back[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int hidden = static_cast<int>(params.hidden), batch = static_cast<int>(params.batch);
  const int steps = static_cast<int>(params.steps);
  const int blocks = (hidden + kColumns - 1) / kColumns;
  const int group = blockIdx.x / blocks, first_column = blockIdx.x % blocks * kColumns;
  const int subs = ((batch + kRows - 1) / kRows - group + params.row_groups - 1) / params.row_groups;
  auto first_row = [&](int sub) { return (group + sub * params.row_groups) * kRows; };
  const uint32_t step_size = static_cast<uint32_t>(batch) * hidden;

  // Teams of warps finish sub-batches in turn. A thread has two columns of a row.
  const int team = threadIdx.x / Layout::kFinishing;
  const int member = threadIdx.x % Layout::kFinishing;
  const int upper = warp % 2;
  const int row = upper * 4 + lane % 4;
  const int column = first_column + member / (2 * kWarp) * kTile + lane / 4 * 2;
  auto is_valid = [&](int sub) { return first_row(sub) + row < batch && column < hidden; };
  // Of [B, H].
  auto place = [&](int sub) { return static_cast<uint32_t>(first_row(sub) + row) * hidden + column; };

  using Bits = BitsOfTwo<S>;
  Bits* ring = reinterpret_cast<Bits*>(grid_shared_back + Layout::kRing) + threadIdx.x;
  Turn fetched = {0, team};
  int slot = 0;
  auto fetch = [&] {
    const bool wanted = fetched.step < steps && is_valid(fetched.sub);
    const uint32_t at = wanted ? (steps - 1 - fetched.step) * step_size + place(fetched.sub) : 0;
    const uint32_t at_gate = wanted ? 3 * at - 2 * column : 0;
    Bits* to = ring + slot * (Layout::kSaved * kBlock);
    auto copy = [&](int index, const void* from, uint32_t at) {
      const S* place = static_cast<const S*>(from != nullptr ? from : params.c) + at;
      copy_async(to + index * kBlock, reinterpret_cast<const Bits*>(place), wanted && from != nullptr);
    };
    copy(0, params.grad_output, at);
    copy(1, params.activations, at_gate);
    copy(2, params.activations, at_gate + (wanted ? hidden : 0));
    copy(3, params.activations, at_gate + (wanted ? 2 * hidden : 0));
    copy(4, params.c, at);
    commit_copies();
    slot = (slot + 1) % kAhead;
    fetched.sub += kTeams;
    if (fetched.sub >= subs) fetched = {fetched.step + 1, team};
  };
  float2* state = reinterpret_cast<float2*>(grid_shared_back + Layout::kState) + member;
  for (int sub = team; sub < subs; sub += kTeams) {
    const float* from = static_cast<const float*>(params.grad_c) + place(sub);
    state[sub * Layout::kFinishing] = is_valid(sub) ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
  }
  if (team < subs) {
    for (int turn = 0; turn < kAhead; ++turn) fetch();
  }
  const int first_term = warp * kSpan<T> + lane % 4 * kLanesOf16Bytes<T>;
  Weights weights;
  weights.load(params, first_column, first_term, grid_shared_back + Layout::kWeights);

  // What this lane multiplies: of the step behind, whose gates are the terms.
  struct Source {
    const T* from;
    int terms;  // from there to the row's end; none where nothing is sent
  };
  T* gates = static_cast<T*>(params.grad_gates);
  auto source = [&](const Turn& turn) {
    const int from_row = first_row(turn.sub) + lane / 4;
    const bool valid = turn.step > 0 && turn.step <= steps && from_row < batch;
    const uint32_t at = (steps - turn.step) * step_size + static_cast<uint32_t>(from_row) * hidden;
    return Source{gates + (valid ? kGates * at + first_term : 0), valid ? kGates * hidden - first_term : 0};
  };
  uint4 messages[2][kChunk];
  auto load = [&](const Source& source, int chunk, bool only_unsent) {
#pragma unroll
    for (int index = 0; index < kChunk; ++index) {
      const int vector = chunk * kChunk + index;
      uint4& message = messages[chunk % 2][index];
      if (vector >= kVectors || (only_unsent && !is_unsent(message))) continue;
      message = vector * Weights::kStride < source.terms
                    ? load_message(source.from + vector * Weights::kStride)
                    : uint4{};
    }
  };
  auto is_missing = [&](int chunk) {
    bool missing = false;
#pragma unroll
    for (int index = 0; index < kChunk; ++index) {
      if (chunk * kChunk + index < kVectors) missing |= is_unsent(messages[chunk % 2][index]);
    }
    return __any_sync(~0u, missing);
  };

  // Where a lane puts its four sums of a tile, and finds two of them: in an order in which neither meets
  // another lane in the same bank.
  const int high = lane % 4 / 2;
  const int put_at =
      (high * 16 + ((lane / 4 * 2 + lane % 2) ^ (high * 4))) * static_cast<int>(sizeof(float4));
  const int find_at = member / (2 * kWarp) * Layout::kOfTile +
                      (upper * 16 + ((lane / 2) ^ (upper * 4))) * static_cast<int>(sizeof(float4)) +
                      lane % 2 * static_cast<int>(sizeof(float2));
  const int last = params.needs_grad_h0 ? steps : steps - 1;
  Turn turn = {};
  Source next = {};
  int buffer = 0;
  while (turn.step <= last) {
    unsigned char* partials = grid_shared_back + buffer * Layout::kOfTurn;
    const Turn now = turn;
    turn.advance(subs);
    if (now.step > 0) {
      // With one sub-batch the next messages are not sent before these are read.
      const bool early = subs > 1 && (now.step > 1 || now.sub > 0);
      const Source here = early ? next : source(now);
      if (!early) {
        load(here, 0, false);
        if constexpr (kChunks > 1) load(here, 1, false);
      }
      next = source(turn);
      float sums[Weights::kChains][kTiles][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        while (is_missing(chunk)) {
          load(here, chunk, true);
          if (chunk + 1 < kChunks) load(here, chunk + 1, true);
        }
#pragma unroll
        for (int index = 0; index < kChunk; ++index) {
          const int vector = chunk * kChunk + index;
          if (vector < kVectors) weights.multiply(sums, vector, messages[chunk % 2][index]);
        }
        if (chunk + 2 < kChunks) {
          load(here, chunk + 2, false);
        } else if (subs > 1) {
          load(next, chunk % 2, false);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int chain = 1; chain < Weights::kChains; ++chain) {
#pragma unroll
          for (int of = 0; of < 4; ++of) sums[0][tile][of] += sums[chain][tile][of];
        }
        const auto& sum = sums[0][tile];
        *reinterpret_cast<float4*>(partials + warp * Layout::kOfWarp + tile * Layout::kOfTile + put_at) =
            make_float4(sum[0], sum[2], sum[1], sum[3]);
      }
      buffer = 1 - buffer;
      __syncthreads();
    }
    if (now.sub % kTeams != team) continue;

    const bool valid = is_valid(now.sub);
    float2 grad_h = {0, 0};
    if (now.step > 0) {
      const unsigned char* from = partials + find_at;
#pragma unroll
      for (int part = 0; part < kWarps; ++part) {
        const float2 of = *reinterpret_cast<const float2*>(from + part * Layout::kOfWarp);
        grad_h.x += of.x;
        grad_h.y += of.y;
      }
    } else if (valid) {
      grad_h = *reinterpret_cast<const float2*>(static_cast<const float*>(params.grad_h) + place(now.sub));
    }
    if (now.step == steps) {
      if (valid) *reinterpret_cast<float2*>(static_cast<float*>(params.grad_h) + place(now.sub)) = grad_h;
      continue;
    }
    float2 grad_c = state[now.sub * Layout::kFinishing];
    float grads[kGates][2];
    wait_for_copies<kAhead - 1>();
    auto saved = [&](int index) { return values_of<S>(ring[(slot * Layout::kSaved + index) * kBlock]); };
    const float2 grad_output = saved(0), i = saved(1), o = saved(2), g = saved(3), c = saved(4);
    auto finish = [&](int at, float grad_h, float& grad_c, float i, float o, float g, float c) {
      const float tanh_c = tanh(c);
      grad_c += grad_h * (o * tanh_grad(tanh_c));
      grads[0][at] = grad_c * (Activation<T, float>::of_candidate(g) * sigmoid_grad(i));
      grads[1][at] = grad_h * (tanh_c * sigmoid_grad(o));
      grads[2][at] = grad_c * (i * Activation<T, float>::candidate_grad(g));
    };
    finish(0, grad_h.x + grad_output.x, grad_c.x, i.x, o.x, g.x, c.x);
    finish(1, grad_h.y + grad_output.y, grad_c.y, i.y, o.y, g.y, c.y);
    if (valid) {
      T* to = gates + kGates * ((steps - 1 - now.step) * step_size + place(now.sub)) - 2 * column;
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        send_two(to + gate * hidden, grads[gate][0], grads[gate][1]);
      }
      // By then it may have left the L2 cache, and readers would wait for the memory.
      if (lane / 4 == 0 && now.step + kNear < steps) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          prefetch(to + gate * hidden - static_cast<int64_t>(kNear * kGates) * step_size);
        }
      }
    }
    state[now.sub * Layout::kFinishing] = grad_c;
    fetch();
  }
  for (int sub = team; sub < subs; sub += kTeams) {
    float* to = static_cast<float*>(params.grad_c) + place(sub);
    if (is_valid(sub)) *reinterpret_cast<float2*>(to) = state[sub * Layout::kFinishing];
  }
#endif
}

template <typename S, typename T, int kTiles, int kVectors, int kShared, int kChunk>
GridStatus start(const LltmGridBackward& params, cudaStream_t stream) {
  using Layout = GridLayoutBack<GridWeightsBack<T, kTiles, kVectors, kShared>, kTiles, sizeof(BitsOfTwo<S>)>;
  const int bytes = Layout::kState + subs_of(params) * Layout::kFinishing * static_cast<int>(sizeof(float2));
  const auto size = static_cast<size_t>(params.steps * params.batch * kGates * params.hidden) * sizeof(T);
  return start_grid<lltm_grid_backward<S, T, kTiles, kVectors, kShared, kChunk>, kBlock>(
      params, bytes, params.grad_gates, size, stream);
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
      if (vectors <= 6) return start<S, T, 2, 6, 0, 3>(params, stream);
      if (vectors <= 9) return start<S, T, 2, 9, 2, 3>(params, stream);
      if (vectors <= 12) return start<S, T, 2, 12, 12, 3>(params, stream);
    } else {
      if (vectors <= 6) return start<S, T, 1, 6, 0, 3>(params, stream);
      if (vectors <= 9) return start<S, T, 1, 9, 0, 5>(params, stream);
      if (vectors <= 12) return start<S, T, 1, 12, 0, 6>(params, stream);
      if (vectors <= 18) return start<S, T, 1, 18, 0, 5>(params, stream);
      if (vectors <= 24) return start<S, T, 1, 24, 12, 3>(params, stream);
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
