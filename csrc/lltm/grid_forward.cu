// The forward of the grid; grid.h says how blocks share it.

#include "grid_launch.h"

namespace tch_extension {
namespace {

// Turns whose input gates are on their way, and steps whose messages' memory is.
constexpr int kAhead = 4;
[[maybe_unused]] constexpr int kNear = 4;  // unused where the kernel is empty

// Named barriers of the two buffers.
enum : int { kFull = 1, kFree = 3 };

// W_h of a warp in registers: kTiles tiles of each gate, and a warp's kVectors vectors of each of their rows.
template <typename T, int kTiles, int kVectors>
struct GridWeights {
  __device__ __forceinline__ void load(const LltmGridForward& params, int first_column, int first_term) {
    const bool vectors = reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 &&
                         params.weight_stride % kLanesOf16Bytes<T> == 0;
    vectors ? load<true>(params, first_column, first_term) : load<false>(params, first_column, first_term);
  }

  // A row of W may begin anywhere.
  template <bool kWhole>
  static __device__ __forceinline__ uint4 load_vector(const T* from) {
    if constexpr (kWhole) return *reinterpret_cast<const uint4*>(from);
    uint4 vector;
    auto* values = reinterpret_cast<T*>(&vector);
#pragma unroll
    for (int at = 0; at < kLanesOf16Bytes<T>; ++at) values[at] = from[at];
    return vector;
  }

  template <bool kWhole>
  __device__ __forceinline__ void load(const LltmGridForward& params, int first_column, int first_term) {
    const int hidden = static_cast<int>(params.hidden), lane = threadIdx.x % kWarp;
#pragma unroll
    for (int tile = 0; tile < kGates * kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = first_column + tile % kTiles * kTile + lane / 4 + half * 8;
        const T* row = static_cast<const T*>(params.weight) +
                       static_cast<int64_t>(tile / kTiles * hidden + column) * params.weight_stride;
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          const int term = first_term + vector * kSpan<T> + lane % 4 * kLanesOf16Bytes<T>;
          const bool valid = column < hidden && term < hidden;
          const uint4 of = operands<T>(valid ? load_vector<kWhole>(row + term) : uint4{});
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

// Shared memory, in floats: partial sums of two turns; input gates of the next turns; c of each sub-batch. Of
// the partial sums of a warp and a gate, eight columns are 64, and one more, so that a row of all columns
// lies in different banks.
template <int kColumns>
struct GridLayout {
  static constexpr int kEight = 2 * kWarp + 1;
  static constexpr int kOfGate = kColumns / 8 * kEight;
  static constexpr int kOfWarp = kGates * kOfGate;
  static constexpr int kPartials = kWarps * kOfWarp;
  static constexpr int kElements = kRows * kColumns;
  static constexpr int kRing = 2 * kPartials;
  static constexpr int kState = kRing + kAhead * kGates * kElements;
};

// What a block computes.
template <int kColumns>
struct GridPlace {
  explicit __device__ __forceinline__ GridPlace(const LltmGridForward& params)
      : hidden(static_cast<int>(params.hidden)), batch(static_cast<int>(params.batch)) {
    const int blocks = (hidden + kColumns - 1) / kColumns;
    group = blockIdx.x / blocks;
    first_column = blockIdx.x % blocks * kColumns;
    subs = ((batch + kRows - 1) / kRows - group + params.row_groups - 1) / params.row_groups;
    row_step = params.row_groups * kRows;
  }
  __device__ __forceinline__ int first_row(int sub) const { return group * kRows + sub * row_step; }

  int hidden, batch, group, first_column, subs, row_step;
};

// The products of a turn, again and again.
template <typename T, int kColumns, int kVectors>
struct GridProducer {
  using Layout = GridLayout<kColumns>;
  static constexpr int kTiles = kColumns / kTile;
  static constexpr int kFlights = kVectors > 4 ? 2 : 1;
  static constexpr int kInFlight = kVectors / kFlights;
  // Of two tiles there are registers for one gate's sums at a time, and each tile has two, so that enough
  // instructions are on their way.
  static constexpr int kAtATime = kTiles == 1 ? kGates : 1;
  static constexpr int kChains = kTiles;

  __device__ __forceinline__ GridProducer(const LltmGridForward& p, const GridPlace<kColumns>& at)
      : params(p), place(at), lane(threadIdx.x % kWarp), warp(threadIdx.x / kWarp) {
    first_term = warp * kVectors * kSpan<T> + lane % 4 * kLanesOf16Bytes<T>;
    weights.load(params, place.first_column, warp * kVectors * kSpan<T>);
  }

  __device__ __forceinline__ uint4 load_vector(const Turn& turn, int vector) const {
    const int row = place.first_row(turn.sub) + lane / 4;
    const bool valid = row < place.batch && first_term + vector * kSpan<T> < place.hidden;
    const T* from = static_cast<const T*>(turn.step == 0 ? params.h0 : params.exchange);
    const uint32_t rows = (turn.step == 0 ? 0 : turn.step - 1) * place.batch + row;
    return valid ? load_message(from + rows * place.hidden + first_term + vector * kSpan<T>) : uint4{};
  }

  __device__ __forceinline__ void load(const Turn& turn, int flight) {
#pragma unroll
    for (int vector = 0; vector < kInFlight; ++vector) {
      h[vector] = load_vector(turn, flight * kInFlight + vector);
    }
  }

  __device__ __forceinline__ void wait(const Turn& turn, int flight) {
    if (turn.step > 0) {
      bool missing;
      do {
        missing = false;
#pragma unroll
        for (int vector = 0; vector < kInFlight; ++vector) {
          if (is_missing<T>(h[vector])) {
            missing = true;
            h[vector] = load_vector(turn, flight * kInFlight + vector);
          }
        }
      } while (__any_sync(~0u, missing));
    }
#pragma unroll
    for (int vector = 0; vector < kInFlight; ++vector) h[vector] = operands<T>(h[vector]);
  }

  __device__ __forceinline__ void run(int turns, float* partials) {
    Turn turn = {};
    load(turn, 0);
    for (int done = 0; done < turns; ++done) {
      const Turn now = turn;
      turn.advance(place.subs);
      const int buffer = done % 2;
      float* written = partials + buffer * Layout::kPartials + warp * Layout::kOfWarp + lane;
#pragma unroll
      for (int gate = 0; gate < kGates; gate += kAtATime) {
        float sums[kChains][kAtATime * kTiles][4] = {};
#pragma unroll
        for (int flight = 0; flight < kFlights; ++flight) {
          if (gate == 0) wait(now, flight);
          multiply(sums, gate, flight);
          if (flight + 1 < kFlights) load(now, flight + 1);
        }
        if (gate == 0 && done > 1) barrier_of(kFree + buffer, kGridThreads);
        write(written + gate * Layout::kOfGate, sums);
      }
      arrive_at(kFull + buffer, kGridThreads);
      if (done + 1 < turns) load(turn, 0);
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kChains][kAtATime * kTiles][4], int gate,
                                           int flight) const {
#pragma unroll
    for (int vector = 0; vector < kInFlight; ++vector) {
#pragma unroll
      for (int tile = 0; tile < kAtATime * kTiles; ++tile) {
        multiply_add_vector<T>(sums[0][tile], sums[kChains - 1][tile],
                               weights.parts[gate * kTiles + tile][flight * kInFlight + vector], h[vector]);
      }
    }
  }

  __device__ __forceinline__ void write(float* to, const float (&sums)[kChains][kAtATime * kTiles][4]) const {
#pragma unroll
    for (int tile = 0; tile < kAtATime * kTiles; ++tile) {
#pragma unroll
      for (int of = 0; of < 4; ++of) {
        float sum = sums[0][tile][of];
        if constexpr (kChains == 2) sum += sums[1][tile][of];
        to[tile / kTiles * Layout::kOfGate + (tile % kTiles * 2 + of / 2) * Layout::kEight + of % 2 * kWarp] =
            sum;
      }
    }
  }

  const LltmGridForward& params;
  const GridPlace<kColumns>& place;
  const int lane, warp;
  int first_term;
  GridWeights<T, kTiles, kVectors> weights;
  uint4 h[kInFlight];
};

// What is behind the products: sums, gates and states.
template <typename S, typename T, int kColumns>
struct GridFinisher {
  using Layout = GridLayout<kColumns>;
  // Elements of a thread: rows that are kStep apart.
  static constexpr int kEach = Layout::kElements / kFinishers;
  static constexpr int kStep = kRows / kEach;

  __device__ __forceinline__ GridFinisher(const LltmGridForward& p, const GridPlace<kColumns>& at,
                                          float* shared, float (&of_bias)[kGates][kFinishers])
      : params(p), place(at) {
    const int thread = threadIdx.x - kProducers;
    row = thread / kColumns;
    of_block = thread % kColumns;
    column = place.first_column + of_block;
    bias = of_bias[0] + thread;
    ring = shared + Layout::kRing + thread;
    state = shared + Layout::kState + thread;
    read_at = (of_block / 8) * Layout::kEight + row % 2 * kWarp + of_block % 8 * 4 + row / 2;
  }

  __device__ __forceinline__ bool is_valid(int sub, int of) const {
    return column < place.hidden && place.first_row(sub) + row + of * kStep < place.batch;
  }
  // The row among those of all steps.
  __device__ __forceinline__ uint32_t row_of(const Turn& turn, int of) const {
    return turn.step * place.batch + place.first_row(turn.sub) + row + of * kStep;
  }

  __device__ __forceinline__ void fetch(int slot, const Turn& turn, bool is_there) {
#pragma unroll
    for (int of = 0; of < kEach; ++of) {
      const bool wanted = is_there && is_valid(turn.sub, of);
      const float* from = static_cast<const float*>(params.input_gates) +
                          (wanted ? row_of(turn, of) * (kGates * place.hidden) + column : 0);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        copy_async(ring + ((slot * kGates + gate) * kEach + of) * kFinishers,
                   from + (wanted ? gate * place.hidden : 0), wanted);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void run(int turns, const float* partials) {
    Turn fetched = {}, turn = {};
    for (int done = 0; done < kAhead; ++done, fetched.advance(place.subs)) fetch(done, fetched, done < turns);
    const bool has_bias = params.bias != nullptr && column < place.hidden;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      bias[gate * kFinishers] =
          has_bias ? static_cast<const float*>(params.bias)[gate * place.hidden + column] : 0.0f;
    }
    for (int sub = 0; sub < place.subs; ++sub) {
      for (int of = 0; of < kEach; ++of) {
        state[(sub * kEach + of) * kFinishers] =
            is_valid(sub, of) ? static_cast<float>(static_cast<const S*>(
                                    params.c0)[row_of({0, sub}, of) * place.hidden + column])
                              : 0.0f;
      }
    }
    for (int done = 0; done < turns; ++done) {
      float gates[kEach][kGates];
      const int slot = done % kAhead;
      wait_for_copies<kAhead - 1>();
#pragma unroll
      for (int of = 0; of < kEach; ++of) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          gates[of][gate] =
              ring[((slot * kGates + gate) * kEach + of) * kFinishers] + bias[gate * kFinishers];
        }
      }
      const int buffer = done % 2;
      barrier_of(kFull + buffer, kGridThreads);
      const float* read = partials + buffer * Layout::kPartials + read_at;
#pragma unroll
      for (int of = 0; of < kEach; ++of) {
#pragma unroll
        for (int gate = 0; gate < kGates; ++gate) {
          auto part = [&](int warp) {
            return read[warp * Layout::kOfWarp + gate * Layout::kOfGate + of * (kStep / 2)];
          };
          const float first = (part(0) + part(1)) + (part(2) + part(3));
          gates[of][gate] += first + ((part(4) + part(5)) + (part(6) + part(7)));
        }
      }
      if (done + 2 < turns) arrive_at(kFree + buffer, kGridThreads);
      finish(turn, gates);
      fetch(slot, fetched, done + kAhead < turns);
      fetched.advance(place.subs);
      turn.advance(place.subs);
    }
    if (params.c_stride != 0) return;
    for (int sub = 0; sub < place.subs; ++sub) {
      for (int of = 0; of < kEach; ++of) {
        if (!is_valid(sub, of)) continue;
        static_cast<S*>(params.c)[row_of({0, sub}, of) * place.hidden + column] =
            static_cast<S>(state[(sub * kEach + of) * kFinishers]);
      }
    }
  }

  __device__ __forceinline__ void finish(const Turn& turn, const float (&gates)[kEach][kGates]) {
    using std::tanh;
    float i[kEach], o[kEach], c[kEach], h[kEach];
#pragma unroll
    for (int of = 0; of < kEach; ++of) {
      i[of] = Activation<T, float>::of_gate(gates[of][0]);
      o[of] = Activation<T, float>::of_gate(gates[of][1]);
      c[of] = state[(turn.sub * kEach + of) * kFinishers] +
              Activation<T, float>::of_candidate(gates[of][2]) * i[of];
      h[of] = tanh(c[of]) * o[of];
      const uint32_t at = row_of(turn, of) * place.hidden + column;
      if (is_valid(turn.sub, of)) send_message(static_cast<T*>(params.exchange) + at, static_cast<T>(h[of]));
    }
#pragma unroll
    for (int of = 0; of < kEach; ++of) {
      state[(turn.sub * kEach + of) * kFinishers] = c[of];
      if (!is_valid(turn.sub, of)) continue;
      const uint32_t at = row_of(turn, of) * place.hidden + column;
      if constexpr (!std::is_same_v<S, T>) static_cast<S*>(params.output)[at] = static_cast<S>(h[of]);
      if (params.c_stride != 0) static_cast<S*>(params.c)[at] = static_cast<S>(c[of]);
      if (params.activations != nullptr) {
        S* activations =
            static_cast<S*>(params.activations) + row_of(turn, of) * (kGates * place.hidden) + column;
        activations[0] = static_cast<S>(i[of]);
        activations[place.hidden] = static_cast<S>(o[of]);
        activations[2 * place.hidden] = static_cast<S>(gates[of][2]);
      }
      // By then it may have left the L2 cache, and readers would wait for the memory.
      if (of_block == 0 && turn.step + kNear < params.steps) {
        prefetch(static_cast<const T*>(params.exchange) + at +
                 static_cast<uint32_t>(kNear * place.batch) * place.hidden);
      }
    }
  }

  const LltmGridForward& params;
  const GridPlace<kColumns>& place;
  int row, of_block, column, read_at;
  float* bias;
  float* ring;
  float* state;
};

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename T, int kColumns, int kVectors>
__global__ void __launch_bounds__(kGridThreads, 1)
    lltm_grid_forward(const __grid_constant__ LltmGridForward params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) float grid_shared[];
  __shared__ float bias[kGates][kFinishers];
  const GridPlace<kColumns> place(params);
  const int turns = static_cast<int>(params.steps) * place.subs;
  if (threadIdx.x < kProducers) {
    take_registers<kProducerRegisters>();
    GridProducer<T, kColumns, kVectors>(params, place).run(turns, grid_shared);
  } else {
    leave_registers<kFinisherRegisters>();
    GridFinisher<S, T, kColumns>(params, place, grid_shared, bias).run(turns, grid_shared);
  }
#endif
}

template <typename S, typename T, int kColumns, int kVectors>
GridStatus start(const LltmGridForward& params, cudaStream_t stream) {
  const int bytes = (GridLayout<kColumns>::kState + subs_of(params) * GridLayout<kColumns>::kElements) *
                    static_cast<int>(sizeof(float));
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return start_grid<lltm_grid_forward<S, T, kColumns, kVectors>, kGridThreads>(params, bytes, params.exchange,
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
  // What is compiled for any other architecture than Hopper's own is empty, and without its bias.
  if (error == cudaSuccess && code.sharedSizeBytes == 0) return nullptr;
  if (error == cudaSuccess) error = allow<kLargest>();
  constexpr size_t kBytes = GridLayout<32>::kState * sizeof(float);
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
