// The forward of a wide grid; grid.h says how blocks share it. A block takes kWideRows rows at once, by
// products of warpgroups: W_h lies in shared memory, and h comes from the other blocks into registers.

#include "../gemm/hopper_ptx.h"
#include "grid_launch.h"

namespace tch_extension {
namespace {

constexpr int kWideRows = 64;
// Of h, of a block.
constexpr int kWideColumns = 32;
constexpr int kGateColumns = kGates * kWideColumns;
// Two warpgroups share the terms of the block's sums, and then finish half of the columns each.
constexpr int kGroupThreads = 4 * kWarp;
constexpr int kWideThreads = 2 * kGroupThreads;
constexpr int kGroupColumns = kWideColumns / 2;
// Of a thread: neighbouring columns in each of two rows.
constexpr int kOwn = 4;
// Vectors that are asked for at once, while those before are multiplied.
constexpr int kAtOnce = 4;
// Steps for whose messages and gates there is a place in the L2 cache.
[[maybe_unused]] constexpr int kWideNear = 4;

// Named barriers of each warp and the one of the other group that has the same rows: sums are there; the
// first group's may be overwritten, and the second's.
enum : int { kSent = 1, kRead = 5 };

// Shared memory, in bytes: W_h, 64 terms of all of the block's columns after another, in rows of 128 bytes;
// sums for the other group; the bias. A warp has a vector of 16 bytes for each lane of 8 rows of h, 32 terms.
template <int kVectors>
struct WideLayout {
  static constexpr int kRow = 128;
  static constexpr int kPart = kGateColumns * kRow;
  static constexpr int kSpans = 2 * kVectors;
  static constexpr int kSums = kSpans / 2 * kPart;
  static constexpr int kSumsOfThread = kGates * 2 * kOwn;
  static constexpr int kBias = kSums + kWideThreads * kSumsOfThread * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kBias + kGateColumns * static_cast<int>(sizeof(float));
};

template <typename S>
__device__ __forceinline__ void store_own(S* to, const float (&values)[kOwn]) {
  Vector<S, kOwn> own;
#pragma unroll
  for (int of = 0; of < kOwn; ++of) own.lane[of] = static_cast<S>(values[of]);
  *reinterpret_cast<Vector<S, kOwn>*>(to) = own;
}

// One message of four values, which says by its first two whether it is one: there are no two of which all
// bits are set.
template <typename T>
__device__ __forceinline__ void send_own(T* to, const float (&values)[kOwn]) {
  constexpr uint32_t kNone = 0xffffffff, kNotANumber = 0x7fffffff;
  Vector<T, kOwn> own;
#pragma unroll
  for (int of = 0; of < kOwn; ++of) own.lane[of] = static_cast<T>(values[of]);
  uint2 words = *reinterpret_cast<const uint2*>(&own);
  if (words.x == kNone) words.x = kNotANumber;
  asm volatile(
      "{\n.reg .b64 both;\nmov.b64 both, {%1, %2};\nst.relaxed.gpu.global.b64 [%0], both;\n}" ::"l"(to),
      "r"(words.x), "r"(words.y)
      : "memory");
}

// Which column of the block a column of the product is, for one of the groups. Each group has the columns
// that it finishes in front, and a thread has neighbours of those.
__device__ __forceinline__ int column_of(int of_product, int group) {
  const int tile = of_product % kWideColumns / 8, of_tile = of_product % 8;
  return kGroupColumns * (group ^ (tile / 2)) + of_tile / 2 * kOwn + tile % 2 * 2 + of_tile % 2;
}

// A row of W may begin anywhere.
template <typename T>
__device__ __forceinline__ uint4 load_terms(const T* from, bool whole) {
  if (whole) return *reinterpret_cast<const uint4*>(from);
  uint4 terms;
  auto* values = reinterpret_cast<T*>(&terms);
  for (int at = 0; at < kLanesOf16Bytes<T>; ++at) values[at] = from[at];
  return terms;
}

// W_h into shared memory, swizzled, and terms in the order in which a lane's 16 bytes of h have them: of two
// products, a lane takes two terms, and two that are 8 behind them.
template <typename T, int kVectors>
__device__ __forceinline__ void load_weights(const LltmGridForward& params, int first_column, char* shared) {
  using Layout = WideLayout<kVectors>;
  constexpr int kOfRow = Layout::kSpans * 4;
  const int hidden = static_cast<int>(params.hidden);
  const bool whole =
      reinterpret_cast<uintptr_t>(params.weight) % 16 == 0 && params.weight_stride % kLanesOf16Bytes<T> == 0;
  for (int at = threadIdx.x; at < kGateColumns * kOfRow; at += kWideThreads) {
    const int row = at / kOfRow, vector = at % kOfRow, span = vector / 4;
    const int column = first_column + column_of(row, span / kVectors);
    const int term = vector * kLanesOf16Bytes<T>;
    uint4 terms = {};
    if (column < hidden && term < hidden) {
      const int64_t of_gate = row / kWideColumns * hidden + column;
      terms = load_terms(static_cast<const T*>(params.weight) + of_gate * params.weight_stride + term, whole);
    }
    char* to = shared + span / 2 * Layout::kPart + row * Layout::kRow + vector % 4 * 4;
    const uint32_t words[] = {terms.x, terms.y, terms.z, terms.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      *reinterpret_cast<uint32_t*>(to + ((span % 2 * 4 + word) ^ (row % 8)) * 16) = words[word];
    }
  }
}

__device__ __forceinline__ void load_bias(const LltmGridForward& params, int first_column, float* shared) {
  if (threadIdx.x >= kGateColumns) return;
  const int hidden = static_cast<int>(params.hidden);
  const int column = first_column + threadIdx.x % kWideColumns;
  const int of_gate = threadIdx.x / kWideColumns * hidden + column;
  const bool is_there = params.bias != nullptr && column < hidden;
  shared[threadIdx.x] = is_there ? static_cast<const float*>(params.bias)[of_gate] : 0.0f;
}

// Activations of a half kind, by instructions that take what is nearly zero for zero.
struct WideActivation {
  static __device__ __forceinline__ float exp2_of(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  static __device__ __forceinline__ float one_over(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
  static constexpr float kLog2OfE = 1.44269504f;

  static __device__ __forceinline__ float of_gate(float x) { return one_over(1.0f + exp2_of(-kLog2OfE * x)); }
  static __device__ __forceinline__ float of_candidate(float x) {
    // exp(x) - 1 loses its digits near 0, where few terms of the series are enough.
    float series = 1.0f / 120 * x + 1.0f / 24;
    series = series * x + 1.0f / 6;
    series = series * x + 0.5f;
    series = series * x * x + x;
    const float negative = x > -0.25f ? series : exp2_of(kLog2OfE * x) - 1.0f;
    return x > 0 ? x : negative;
  }
  static __device__ __forceinline__ float of_c(float x) {
    const float square = x * x;
    float series = -17.0f / 315 * square + 2.0f / 15;
    series = series * square - 1.0f / 3;
    series = series * square * x + x;
    const float other = 1.0f - 2.0f * one_over(1.0f + exp2_of(2 * kLog2OfE * x));
    return fabsf(x) < 0.25f ? series : other;
  }
};

// Where there are no terms of h.
[[maybe_unused]] __device__ uint4 wide_zeros;

// Rows of the batch, all steps of them. A thread has of the product rows lane / 4 of its warp's 16, and 8
// below.
template <typename S, typename T, int kVectors, bool kWhole>
struct WideForward {
  using Layout = WideLayout<kVectors>;
  static constexpr int kLanes = kLanesOf16Bytes<T>;

  __device__ __forceinline__ WideForward(const LltmGridForward& p, int of_grid, char* shared)
      : params(p), hidden(static_cast<int>(p.hidden)), batch(static_cast<int>(p.batch)) {
    const int lane = threadIdx.x % kWarp;
    group = threadIdx.x / kGroupThreads;
    warp = threadIdx.x % kGroupThreads / kWarp;
    of_four = lane % 4;
    of_rows = warp * 16 + lane / 4;
    of_block = kGroupColumns * group + kOwn * of_four;
    column = of_grid + of_block;
    first_term = (group * kVectors * 4 + of_four) * kLanes;
    vectors = first_term < hidden ? (hidden - 1 - first_term) / kSpan<T> + 1 : 0;
    weights = static_cast<uint32_t>(
        gemm::tile_descriptor<false>(shared_address(shared) + group * (kVectors / 2 * Layout::kPart)));
    all_sums = reinterpret_cast<float4*>(shared + Layout::kSums) + threadIdx.x % kGroupThreads;
    bias = reinterpret_cast<const float*>(shared + Layout::kBias) + of_block;
  }

  __device__ __forceinline__ bool is_row(int half) const { return row + 8 * half < batch; }
  __device__ __forceinline__ bool is_own(int half) const { return is_row(half) && column < hidden; }
  // The row among those of all steps.
  __device__ __forceinline__ uint32_t row_of(int step, int half) const {
    return static_cast<uint32_t>(step) * batch + row + 8 * half;
  }

  __device__ __forceinline__ void run(int first_row) {
    row = first_row + of_rows;
    any_row = first_row;
    load_c();
    load_gates(0);
    find(0);
    load(0);
    for (int step = 0; step < params.steps; ++step) {
      multiply(step);
      exchange();
      finish(step);
    }
    if (params.c_stride != 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_own(half)) store_own(static_cast<S*>(params.c) + row_of(0, half) * hidden + column, c[half]);
    }
  }

  __device__ __forceinline__ void load_c() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) {
        const S* from = static_cast<const S*>(params.c0) + row_of(0, half) * hidden + column + of;
        c[half][of] = is_own(half) ? static_cast<float>(*from) : 0.0f;
      }
    }
  }

  // Where the sum of a gate is, of a row and one of the thread's own columns.
  static constexpr __device__ int own(int gate, int half, int of) {
    return gate * kSumsOfGate + of / 2 * 4 + half * 2 + of % 2;
  }

  // The sums begin with the input's part.
  __device__ __forceinline__ void load_gates(int step) {
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* from = static_cast<const float*>(params.input_gates) +
                            row_of(step, half) * (kGates * hidden) + gate * hidden + column;
        const float4 gates = is_own(half) ? *reinterpret_cast<const float4*>(from) : float4{};
        sums[own(gate, half, 0)] = gates.x;
        sums[own(gate, half, 1)] = gates.y;
        sums[own(gate, half, 2)] = gates.z;
        sums[own(gate, half, 3)] = gates.w;
      }
#pragma unroll
      for (int of_other = kSumsOfGate / 2; of_other < kSumsOfGate; ++of_other) {
        sums[gate * kSumsOfGate + of_other] = 0.0f;
      }
    }
  }

  // Where the thread's terms of the step before are. What is computed for rows that are not there is of
  // another row, and nobody needs it.
  __device__ __forceinline__ void find(int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t of_step = is_row(half) ? row + 8 * half : any_row;
      const uint32_t of_all = (step == 0 ? 0 : static_cast<uint32_t>(step - 1) * batch) + of_step;
      from[half] =
          static_cast<const T*>(step == 0 ? params.h0 : params.exchange) + of_all * hidden + first_term;
    }
  }

  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int vector = first; vector < first + kAtOnce; ++vector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const void* at = from[half] + vector * kSpan<T>;
        if (!kWhole && vector >= vectors) at = &wide_zeros;
        h[vector][half] = load_messages(at);
      }
    }
  }

  __device__ __forceinline__ bool is_missing_of(int first) const {
    uint32_t most = 0;
#pragma unroll
    for (int vector = first; vector < first + kAtOnce; ++vector) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most = max(most, max(h[vector][half].x, h[vector][half].z));
      }
    }
    return most == 0xffffffff;
  }

  // Their descriptors differ in the lower halves only.
  __device__ __forceinline__ uint64_t weights_at(uint32_t offset) const {
    return gemm::tile_descriptor<false>(0) >> 32 << 32 | (weights + offset);
  }

  __device__ __forceinline__ void multiply(int step) {
#pragma unroll
    for (int first = 0; first < kVectors; first += kAtOnce) {
      while (__any_sync(~0u, step > 0 && is_missing_of(first))) load(first);
      if (first + kAtOnce < kVectors) load(first + kAtOnce);
      gemm::begin_products();
#pragma unroll
      for (int vector = first; vector < first + kAtOnce; ++vector) {
        const uint4 &upper = h[vector][0], &lower = h[vector][1];
        constexpr auto kNext = static_cast<uint32_t>(gemm::kNextInner<false>);
        const uint32_t at = (vector / 2 * Layout::kPart + vector % 2 * (Layout::kRow / 2)) >> 4;
        gemm::multiply_add<T>(sums, {upper.x, lower.x, upper.y, lower.y}, weights_at(at));
        gemm::multiply_add<T>(sums, {upper.z, lower.z, upper.w, lower.w}, weights_at(at + kNext));
      }
      gemm::commit_products();
    }
    gemm::wait_for_products<0>();
  }

  // The other group's place may be written to again.
  __device__ __forceinline__ void release_other() const {
    arrive_at(kRead + (group ^ 1) * 4 + warp, 2 * kWarp);
  }
  __device__ __forceinline__ void wait_for_place() const { barrier_of(kRead + group * 4 + warp, 2 * kWarp); }

  // Adds the other group's terms.
  __device__ __forceinline__ void exchange() {
    constexpr int kFours = kSumsOfGate / 8;
    auto four = [&](int of_group, int gate, int of) -> float4& {
      return all_sums[((of_group * kGates + gate) * kFours + of) * kGroupThreads];
    };
    wait_for_place();
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kFours; ++of) {
        const float* from = sums + gate * kSumsOfGate + kSumsOfGate / 2 + of * 4;
        four(group, gate, of) = make_float4(from[0], from[1], from[2], from[3]);
      }
    }
    barrier_of(kSent + warp, 2 * kWarp);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < kFours; ++of) {
        const float4 terms = four(group ^ 1, gate, of);
        float* to = sums + gate * kSumsOfGate + of * 4;
        to[0] += terms.x;
        to[1] += terms.y;
        to[2] += terms.z;
        to[3] += terms.w;
      }
    }
    release_other();
  }

  __device__ __forceinline__ void finish(int step) {
    using Activations = WideActivation;
    float i[2][kOwn], o[2][kOwn], g[2][kOwn], new_h[2][kOwn];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int of = 0; of < kOwn; ++of) {
        i[half][of] = Activations::of_gate(sums[own(0, half, of)] + bias[of]);
        o[half][of] = Activations::of_gate(sums[own(1, half, of)] + bias[kWideColumns + of]);
        g[half][of] = sums[own(2, half, of)] + bias[2 * kWideColumns + of];
        c[half][of] += Activations::of_candidate(g[half][of]) * i[half][of];
        new_h[half][of] = Activations::of_c(c[half][of]) * o[half][of];
      }
      if (is_own(half)) {
        send_own(static_cast<T*>(params.exchange) + row_of(step, half) * hidden + column, new_h[half]);
      }
    }
    const bool is_last = step + 1 == params.steps;
    if (!is_last) load_gates(step + 1);
    if (!is_last) find(step + 1);
    if (is_own(0)) save(step, 0, i[0], o[0], g[0], new_h[0]);
    // When the others' are there, about: earlier, they would be asked for once more.
    if (!is_last) load(0);
    if (is_own(1)) save(step, 1, i[1], o[1], g[1], new_h[1]);
  }

  using Own = float[kOwn];

  __device__ __forceinline__ void save(int step, int half, const Own& i, const Own& o, const Own& g,
                                       const Own& new_h) const {
    const uint32_t at = row_of(step, half) * hidden + column;
    if constexpr (!std::is_same_v<S, T>) store_own(static_cast<S*>(params.output) + at, new_h);
    if (params.c_stride != 0) store_own(static_cast<S*>(params.c) + at, c[half]);
    if (params.activations != nullptr) {
      S* to = static_cast<S*>(params.activations) + row_of(step, half) * (kGates * hidden) + column;
      store_own(to, i);
      store_own(to + hidden, o);
      store_own(to + 2 * hidden, g);
    }
    // By then it may have left the L2 cache, and readers would wait for the memory. Four lanes share what
    // there is of a row.
    if (step + kWideNear >= params.steps) return;
    const uint32_t ahead = row_of(step + kWideNear, half);
    const int first_column = column - kOwn * of_four;
    if (of_four == kGates) {
      prefetch(static_cast<const T*>(params.exchange) + ahead * hidden + first_column);
    } else {
      prefetch(static_cast<const float*>(params.input_gates) + (ahead * kGates + of_four) * hidden +
               first_column);
    }
  }

  static constexpr int kSumsOfGate = 16;

  const LltmGridForward& params;
  const int hidden, batch;
  int group, warp, of_four, of_rows, of_block, column, first_term, vectors, row, any_row;
  uint32_t weights;
  const T* from[2];
  uint4 h[kVectors][2];
  float4* all_sums;
  const float* bias;
  float sums[kGates * kSumsOfGate];
  float c[2][kOwn];
};

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename T, int kVectors, bool kWhole>
__global__ void __launch_bounds__(kWideThreads, 1)
    lltm_grid_wide_forward(const __grid_constant__ LltmGridForward params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char wide_shared[];
  const int hidden = static_cast<int>(params.hidden), batch = static_cast<int>(params.batch);
  const int blocks = (hidden + kWideColumns - 1) / kWideColumns;
  const int first_column = blockIdx.x % blocks * kWideColumns;
  load_weights<T, kVectors>(params, first_column, wide_shared);
  load_bias(params, first_column, reinterpret_cast<float*>(wide_shared + WideLayout<kVectors>::kBias));
  gemm::fence_for_bulk_copies();
  __syncthreads();
  WideForward<S, T, kVectors, kWhole> rows(params, first_column, wide_shared);
  rows.release_other();
  const int row_groups = gridDim.x / blocks;
  for (int first = blockIdx.x / blocks * kWideRows; first < batch; first += row_groups * kWideRows) {
    rows.run(first);
  }
  rows.wait_for_place();
#endif
}

template <typename S, typename T, int kVectors, bool kWhole>
GridStatus start_wide(const LltmGridForward& params, cudaStream_t stream) {
  const auto size = static_cast<size_t>(params.steps * params.batch * params.hidden) * sizeof(T);
  return start_grid<lltm_grid_wide_forward<S, T, kVectors, kWhole>, kWideThreads>(
      params, WideLayout<kVectors>::kBytes, params.exchange, size, stream);
}

struct GridWideForward {
  template <typename S, typename T>
  const char* run() const {
    if constexpr (sizeof(T) != 2) {
      return kNoKernel;
    } else {
      const GridStatus status = start_of<S, T>();
      *fits = status.fits;
      return status.error;
    }
  }

  // With as many vectors of a row for each warp, or more.
  template <typename S, typename T>
  GridStatus start_of() const {
    constexpr int kOfVector = 2 * kSpan<T>;
    if (params.columns != kWideColumns) return {true, kNoKernel};
    if (params.hidden == 8 * kOfVector) return start_wide<S, T, 8, true>(params, stream);
    if (params.hidden == 12 * kOfVector) return start_wide<S, T, 12, true>(params, stream);
    if (params.hidden == 16 * kOfVector) return start_wide<S, T, 16, true>(params, stream);
    if (params.hidden < 12 * kOfVector) return start_wide<S, T, 12, false>(params, stream);
    if (params.hidden < 16 * kOfVector) return start_wide<S, T, 16, false>(params, stream);
    return {true, kNoKernel};
  }

  const LltmGridForward& params;
  bool* fits;
  cudaStream_t stream;
};

}  // namespace
}  // namespace tch_extension

// As tch_extension_lltm_grid_forward_cuda.
extern "C" tch_extension::LaunchStatus tch_extension_lltm_grid_wide_forward_cuda(
    const LltmGridForward* params, bool* fits, cudaStream_t stream) {
  using namespace tch_extension;
  return {"lltm_grid_wide_forward",
          for_kinds(params->kind, params->product_kind, GridWideForward{*params, fits, stream})};
}
