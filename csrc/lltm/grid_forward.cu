// The forward of the grid; grid.h says how blocks share it.

#include "grid_launch.h"

namespace tch_extension {
namespace {

// Turns whose input gates are on their way, and steps whose messages' memory is.
constexpr int kAhead = 4;
constexpr int kNear = 4;

// W_h of a warp in registers: kTiles tiles of each gate, and a warp's kVectors vectors of each of their rows.
template <typename T, int kTiles, int kVectors>
struct GridWeights {
  __device__ void load(const LltmGridForward& params, int first_column, int first_term) {
    const T* weight = static_cast<const T*>(params.weight);
    const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
    const bool vectors =
        reinterpret_cast<uintptr_t>(weight) % 16 == 0 && params.weight_stride % kLanesOf16Bytes<T> == 0;
#pragma unroll
    for (int tile = 0; tile < kGates * kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = first_column + tile % kTiles * kTile + lane / 4 + half * 8;
        const T* row = weight + static_cast<int64_t>(tile / kTiles * hidden + column) * params.weight_stride;
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          const int term = first_term + vector * kSpan<T> + lane % 4 * kLanesOf16Bytes<T>;
          uint4 of = {};
          if (column < hidden && term < hidden) {
            if (vectors) {
              of = *reinterpret_cast<const uint4*>(row + term);
            } else {
              auto* values = reinterpret_cast<T*>(&of);
              for (int at = 0; at < kLanesOf16Bytes<T>; ++at) values[at] = row[term + at];
            }
          }
          of = operands<T>(of);
          parts[tile][vector][0][half] = of.x;
          parts[tile][vector][0][2 + half] = of.y;
          parts[tile][vector][1][half] = of.z;
          parts[tile][vector][1][2 + half] = of.w;
        }
      }
      few_at_a_time();
    }
  }

  uint32_t parts[kGates * kTiles][kVectors][2][4];
};

// Shared memory, in floats: partial sums of two turns; input gates of the next turns; bias; c of each
// sub-batch. Of the partial sums of a warp and a gate, eight columns are 64, and one more, so that a row of
// all columns lies in different banks.
template <int kColumns>
struct GridLayout {
  static constexpr int kEight = 2 * kWarp + 1;
  static constexpr int kOfGate = kColumns / 8 * kEight;
  static constexpr int kOfWarp = kGates * kOfGate;
  static constexpr int kPartials = kWarps * kOfWarp;
  static constexpr int kRing = 2 * kPartials;
  static constexpr int kBias = kRing + kAhead * kGates * kBlock;
  static constexpr int kState = kBias + kGates * kBlock;
};

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename T, int kColumns, int kVectors>
__global__ void __launch_bounds__(kBlock, 1) lltm_grid_forward(const LltmGridForward params) {
#if __CUDA_ARCH__ >= 900
  using std::tanh;
  using Layout = GridLayout<kColumns>;
  constexpr int kTiles = kColumns / kTile;
  extern __shared__ __align__(128) float grid_shared[];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int hidden = static_cast<int>(params.hidden), batch = static_cast<int>(params.batch);
  const int steps = static_cast<int>(params.steps);
  const int blocks = (hidden + kColumns - 1) / kColumns;
  const int group = blockIdx.x / blocks, first_column = blockIdx.x % blocks * kColumns;
  const int subs = ((batch + kRows - 1) / kRows - group + params.row_groups - 1) / params.row_groups;
  auto first_row = [&](int sub) { return (group + sub * params.row_groups) * kRows; };
  const uint32_t step_size = static_cast<uint32_t>(batch) * hidden;

  // A warp finishes a row, and each lane a column. Of 16 columns, the other lanes help with the sums.
  const int column = first_column + lane % kColumns;
  const bool finishes = lane < kColumns && column < hidden;
  auto place = [&](const Turn& turn) {
    return turn.step * step_size + static_cast<uint32_t>(first_row(turn.sub) + warp) * hidden + column;
  };
  // Of a step's gates, beside those of c.
  auto gate_place = [&](const Turn& turn) {
    return place(turn) +
           2 * (turn.step * step_size + static_cast<uint32_t>(first_row(turn.sub) + warp) * hidden);
  };

  float* ring = grid_shared + Layout::kRing + threadIdx.x;
  Turn fetched = {};
  int slot = 0;
  auto fetch = [&] {
    const bool wanted = finishes && fetched.step < steps && first_row(fetched.sub) + warp < batch;
    const float* from = static_cast<const float*>(params.input_gates) + (wanted ? gate_place(fetched) : 0);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      copy_async(ring + (slot * kGates + gate) * kBlock, from + (wanted ? gate * hidden : 0), wanted);
    }
    commit_copies();
    fetched.advance(subs);
    slot = (slot + 1) % kAhead;
  };
  for (int turn = 0; turn < kAhead; ++turn) fetch();

  float* bias = grid_shared + Layout::kBias + threadIdx.x;
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    const bool has = params.bias != nullptr && finishes;
    bias[gate * kBlock] = has ? static_cast<const float*>(params.bias)[gate * hidden + column] : 0.0f;
  }
  float* state = grid_shared + Layout::kState + threadIdx.x;
  for (int sub = 0; sub < subs; ++sub) {
    const bool valid = finishes && first_row(sub) + warp < batch;
    state[sub * kBlock] =
        valid ? static_cast<float>(static_cast<const S*>(params.c0)[place({0, sub})]) : 0.0f;
  }
  // Of a row of h, what this lane multiplies.
  const int first_term = warp * kVectors * kSpan<T> + lane % 4 * kLanesOf16Bytes<T>;
  GridWeights<T, kTiles, kVectors> weights;
  weights.load(params, first_column, warp * kVectors * kSpan<T>);

  uint4 h[kVectors];
  auto load_vector = [&](const Turn& turn, int vector) {
    const int row = first_row(turn.sub) + lane / 4;
    const T* from = turn.step == 0 ? static_cast<const T*>(params.h0)
                                   : static_cast<const T*>(params.exchange) + (turn.step - 1) * step_size;
    const bool valid = row < batch && first_term + vector * kSpan<T> < hidden;
    return valid ? load_message(from + static_cast<uint32_t>(row) * hidden + first_term + vector * kSpan<T>)
                 : uint4{};
  };
  auto load = [&](const Turn& turn) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) h[vector] = load_vector(turn, vector);
  };
  auto wait = [&](const Turn& turn) {
    if (turn.step == 0) return;
    while (true) {
      bool missing = false;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        if (is_missing<T>(h[vector])) {
          missing = true;
          h[vector] = load_vector(turn, vector);
        }
      }
      if (!__any_sync(~0u, missing)) break;
    }
  };

  // Of the sum of a row and column, the lane that has it and its index there.
  const int of_tile = lane % kColumns % kTile;
  const int read_at = (lane % kColumns / kTile * 2 + of_tile / 8) * Layout::kEight + warp % 2 * kWarp +
                      of_tile % 8 * 4 + warp / 2 + lane / kColumns * Layout::kOfWarp;
  int buffer = 0, used = 0;
  Turn turn = {};
  load(turn);
  while (turn.step < steps) {
    wait(turn);
    float sums[kGates * kTiles][4] = {};
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const uint4 b = operands<T>(h[vector]);
#pragma unroll
      for (int tile = 0; tile < kGates * kTiles; ++tile) {
        multiply_add_vector<T>(sums[tile], weights.parts[tile][vector], b);
      }
    }
    float* partials = grid_shared + buffer * Layout::kPartials;
    float* written = partials + warp * Layout::kOfWarp + lane;
#pragma unroll
    for (int tile = 0; tile < kGates * kTiles; ++tile) {
#pragma unroll
      for (int of = 0; of < 4; ++of) {
        written[tile / kTiles * Layout::kOfGate + (tile % kTiles * 2 + of / 2) * Layout::kEight +
                of % 2 * kWarp] = sums[tile][of];
      }
    }
    const Turn done = turn;
    turn.advance(subs);
    float gates[kGates];
    wait_for_copies<kAhead - 1>();
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      gates[gate] = ring[(used * kGates + gate) * kBlock] + bias[gate * kBlock];
    }
    __syncthreads();
    const float* read = partials + read_at;
    constexpr int kHelpers = kWarp / kColumns;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      float part[kWarps / kHelpers];
#pragma unroll
      for (int of = 0; of < kWarps / kHelpers; ++of) {
        part[of] = read[of * kHelpers * Layout::kOfWarp + gate * Layout::kOfGate];
      }
      float sum = (part[0] + part[1]) + (part[2] + part[3]);
      if constexpr (kHelpers == 1) sum += (part[4] + part[5]) + (part[6] + part[7]);
      if constexpr (kHelpers == 2) sum += __shfl_xor_sync(~0u, sum, kColumns);
      gates[gate] += sum;
    }
    const float i = Activation<T, float>::of_gate(gates[0]), o = Activation<T, float>::of_gate(gates[1]);
    const float c = state[done.sub * kBlock] + Activation<T, float>::of_candidate(gates[2]) * i;
    const float new_h = tanh(c) * o;
    const bool valid = finishes && first_row(done.sub) + warp < batch;
    const uint32_t at = place(done);
    if (valid) send_message(static_cast<T*>(params.exchange) + at, static_cast<T>(new_h));
    if (turn.step < steps) load(turn);
    state[done.sub * kBlock] = c;
    fetch();
    if (valid) {
      if constexpr (!std::is_same_v<S, T>) static_cast<S*>(params.output)[at] = static_cast<S>(new_h);
      if (params.c_stride != 0) static_cast<S*>(params.c)[at] = static_cast<S>(c);
      if (params.activations != nullptr) {
        S* activations = static_cast<S*>(params.activations) + gate_place(done);
        activations[0] = static_cast<S>(i);
        activations[hidden] = static_cast<S>(o);
        activations[2 * hidden] = static_cast<S>(gates[2]);
      }
      // By then it may have left the L2 cache, and readers would wait for the memory.
      if (lane == 0 && done.step + kNear < steps) {
        prefetch(static_cast<const T*>(params.exchange) + at + kNear * step_size);
      }
    }
    buffer = 1 - buffer;
    used = (used + 1) % kAhead;
  }
  if (params.c_stride == 0) {
    for (int sub = 0; sub < subs; ++sub) {
      const bool valid = finishes && first_row(sub) + warp < batch;
      if (valid) static_cast<S*>(params.c)[place({0, sub})] = static_cast<S>(state[sub * kBlock]);
    }
  }
#endif
}

template <typename S, typename T, int kColumns, int kVectors>
GridStatus start(const LltmGridForward& params, cudaStream_t stream) {
  const int bytes =
      (GridLayout<kColumns>::kState + subs_of(params) * kBlock) * static_cast<int>(sizeof(float));
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return start_grid<lltm_grid_forward<S, T, kColumns, kVectors>>(params, bytes, params.exchange, size,
                                                                 stream);
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

// `fits` is false where the GPU has no room for all blocks at once: then nothing was started.
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
  constexpr auto kLargest = lltm_grid_forward<__half, __half, 32, 4>;
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
  // What an older architecture's code becomes on a new GPU is empty.
  if (error == cudaSuccess && code.ptxVersion < 90) return nullptr;
  if (error == cudaSuccess) error = allow<kLargest>();
  constexpr size_t kBytes = GridLayout<32>::kState * sizeof(float);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_one, kLargest, kBlock, kBytes);
  }
  if (error == cudaSuccess && of_one > 0) *blocks = processors;
  // Whoever looks for a failure of a launch must not find one of a question.
  (void)cudaGetLastError();
  return nullptr;
}
