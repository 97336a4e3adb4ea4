// A block takes a chunk of a span. The spans themselves are parameters of the kernels, not an array
// in device memory: gradients have new addresses in each step, and a captured graph keeps its own.
#include <algorithm>
#include <cstring>

#include "optim.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension::optim {
namespace {

// The spans of one launch. Parameters of a kernel may have 4 KiB, or nearly 32 KiB, which cost the
// host more.
template <int kCapacity>
struct Table {
  OptimSpan spans[kCapacity];
  int32_t count;
  // The number of spans in earlier launches.
  int32_t first;
};
constexpr int kFew = 44;
constexpr int kMany = 368;

// The part of a span that is this block's chunk.
struct Part {
  int index;
  int count;
  int64_t chunk, begin;
};

template <int kCapacity, typename Params>
__device__ __forceinline__ Part part_of_block(const Table<kCapacity>& table, const Params& params) {
  const int64_t chunk = table.spans[0].begin + blockIdx.x;
  // The last span that begins at this chunk or before it. Spans without values share their `begin`
  // with the span after them.
  int low = 0, high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.spans[middle].begin <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int64_t begin = (chunk - table.spans[low].begin) * params.chunk;
  const int64_t rest = table.spans[low].len - begin;
  return {low, static_cast<int>(rest < params.chunk ? rest : params.chunk), chunk, begin};
}

template <typename T, int kLanes>
__device__ __forceinline__ bool fits(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector<T, kLanes>) == 0;
}

// The number of values of type C in 16 bytes: the vectors of all arrays of a span.
template <typename C>
constexpr int kLanesOf = 16 / sizeof(C);

// The vectors of a thread in each iteration.
constexpr int kVectors = 2;

struct None {};

// The arrays of a chunk, with moments of type M. R is None if there are no rounded weights.
template <typename W, typename R, typename G, typename M, bool kHasLargest>
struct Arrays {
  W* weight;
  R* rounded;
  const G* gradient;
  M* first;
  M* second;
  M* largest;

  __device__ Arrays(const OptimSpan& span, int64_t begin)
      : weight(static_cast<W*>(span.weight) + begin),
        rounded(static_cast<R*>(span.rounded) + begin),
        gradient(static_cast<const G*>(span.gradient) + begin),
        first(span.first == nullptr ? nullptr : static_cast<M*>(span.first) + begin),
        second(span.second == nullptr ? nullptr : static_cast<M*>(span.second) + begin),
        largest(kHasLargest ? static_cast<M*>(span.largest) + begin : nullptr) {}

  template <int kLanes>
  __device__ bool all_fit() const {
    bool all = fits<W, kLanes>(weight) && fits<G, kLanes>(gradient) && fits<M, kLanes>(first) &&
               fits<M, kLanes>(second);
    if constexpr (kHasLargest) all = all && fits<M, kLanes>(largest);
    if constexpr (!std::is_same_v<R, None>) all = all && fits<R, kLanes>(rounded);
    return all;
  }
};

__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }
__device__ __forceinline__ double square_root(double x) { return sqrt(x); }

// NaN stays NaN.
template <typename C>
__device__ __forceinline__ C larger_of(C a, C b) {
  return a >= b || a != a ? a : b;
}

// What a thread holds of each array.
template <typename W, typename R, typename G, typename M, bool kHasLargest, int kLanes>
struct Held {
  using C = Compute<W>;
  Values<W, kLanes> weight;
  Values<G, kLanes> gradient;
  Values<M, kLanes> first, second, largest;

  __device__ __forceinline__ void load(const Arrays<W, R, G, M, kHasLargest>& arrays, int at,
                                       bool has_first, bool has_second) {
    weight = load_values<W, kLanes>(arrays.weight, at);
    gradient = load_values<G, kLanes>(arrays.gradient, at);
    if (has_first) first = load_values<M, kLanes>(arrays.first, at);
    if (has_second) second = load_values<M, kLanes>(arrays.second, at);
    if constexpr (kHasLargest) largest = load_values<M, kLanes>(arrays.largest, at);
  }

  template <typename Rule>
  __device__ __forceinline__ void update(const Arrays<W, R, G, M, kHasLargest>& arrays, int at,
                                         const Rule& rule, bool has_first, bool has_second) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      rule(
          weight.lane[lane], static_cast<C>(gradient.lane[lane]), first.lane[lane],
          second.lane[lane], largest.lane[lane], [](C x) { return square_root(x); },
          [](C a, C b) { return larger_of(a, b); });
    }
    store_values<W, kLanes>(arrays.weight, at, weight);
    if (has_first) store_values<M, kLanes>(arrays.first, at, first);
    if (has_second) store_values<M, kLanes>(arrays.second, at, second);
    if constexpr (kHasLargest) store_values<M, kLanes>(arrays.largest, at, largest);
    if constexpr (!std::is_same_v<R, None>) {
      Values<R, kLanes> rounded;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) rounded.lane[lane] = weight.lane[lane];
      store_values<R, kLanes>(arrays.rounded, at, rounded);
    }
  }
};

// Updates the first `count` values, a multiple of kLanes. Everything is loaded before anything is
// stored, because the compiler must assume that the arrays overlap.
template <int kLanes, typename W, typename R, typename G, typename M, bool kHasLargest,
          typename Rule>
__device__ __forceinline__ void update_vectors(const Arrays<W, R, G, M, kHasLargest>& arrays,
                                               int from, int count, const Rule& rule) {
  const bool has_first = arrays.first != nullptr, has_second = arrays.second != nullptr;
  constexpr int by = kThreads * kLanes;
  for (int at = from + static_cast<int>(threadIdx.x) * kLanes; at < count; at += by * kVectors) {
    Held<W, R, G, M, kHasLargest, kLanes> held[kVectors] = {};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (at + i * by < count) held[i].load(arrays, at + i * by, has_first, has_second);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (at + i * by < count) held[i].update(arrays, at + i * by, rule, has_first, has_second);
    }
  }
}

template <typename W, typename R, typename G, template <typename, typename> class Rule,
          typename M = Compute<W>>
__device__ void update_part(const OptimSpan& span, const OptimCoefficients& coefficients,
                            const Part& part) {
  using C = Compute<W>;
  const Rule<C, C> rule(coefficients);
  const Arrays<W, R, G, M, (Rule<C, C>::kMoments > 2)> arrays(span, part.begin);
  constexpr int kLanes = kLanesOf<C>;
  int whole = 0;
  if (arrays.template all_fit<kLanes>()) {
    whole = part.count / kLanes * kLanes;
    update_vectors<kLanes>(arrays, 0, whole, rule);
  }
  update_vectors<1>(arrays, whole, part.count, rule);
}

// A span of half weights, which may have moments of their kind.
template <typename W, template <typename, typename> class Rule>
__device__ __forceinline__ void update_half(const OptimSpan& span, const OptimCoefficients& c,
                                            const Part& part) {
  const bool has_own = span.gradient_kind == span.kind;
  if (span.moment_kind == span.kind) {
    return has_own ? update_part<W, None, W, Rule, W>(span, c, part)
                   : update_part<W, None, float, Rule, W>(span, c, part);
  }
  has_own ? update_part<W, None, W, Rule>(span, c, part)
          : update_part<W, None, float, Rule>(span, c, part);
}

// The kernels that exist: weights and gradients of one kind; half weights with gradients in float;
// weights in float, rounded to a half kind, with gradients of either. Those of double need more
// registers, so other spans have a kernel without them. The directions of Muon are in fp16,
// whatever the weights are.
enum class Kinds { Usual, WithDouble, FromHalf };

template <template <typename, typename> class Rule, Kinds kKinds>
__device__ __forceinline__ void update_span(const OptimSpan& span, const OptimCoefficients& c,
                                            const Part& part) {
  if constexpr (kKinds == Kinds::FromHalf) {
    if (span.kind == kTchExtensionHalf)
      return update_part<__half, None, __half, Rule>(span, c, part);
    if (span.kind == kTchExtensionBFloat16)
      return update_part<__nv_bfloat16, None, __half, Rule>(span, c, part);
    if (span.rounded == nullptr) return update_part<float, None, __half, Rule>(span, c, part);
    return span.rounded_kind == kTchExtensionHalf
               ? update_part<float, __half, __half, Rule>(span, c, part)
               : update_part<float, __nv_bfloat16, __half, Rule>(span, c, part);
  }
  const bool has_own = span.gradient_kind == span.kind;
  if constexpr (kKinds == Kinds::WithDouble) {
    if (span.kind == kTchExtensionDouble) {
      if (has_own) update_part<double, None, double, Rule>(span, c, part);
      return;
    }
  }
  switch (span.kind) {
    case kTchExtensionHalf:
      return update_half<__half, Rule>(span, c, part);
    case kTchExtensionBFloat16:
      return update_half<__nv_bfloat16, Rule>(span, c, part);
  }
  if (span.rounded == nullptr) {
    if (has_own) update_part<float, None, float, Rule>(span, c, part);
  } else if (span.rounded_kind == kTchExtensionHalf) {
    has_own ? update_part<float, __half, float, Rule>(span, c, part)
            : update_part<float, __half, __half, Rule>(span, c, part);
  } else {
    has_own ? update_part<float, __nv_bfloat16, float, Rule>(span, c, part)
            : update_part<float, __nv_bfloat16, __nv_bfloat16, Rule>(span, c, part);
  }
}

// With three blocks, the compiler uses 80 registers without spilling, and the loads of a
// multiprocessor in flight are 96 KiB. AMSGrad has one array more and needs more than 80: with two
// blocks, 80 KiB are in flight.
template <template <typename, typename> class Rule>
constexpr int kBlocks = Rule<float, float>::kMoments > 2 ? 2 : 3;

template <template <typename, typename> class Rule, Kinds kKinds, int kCapacity>
__global__ void __launch_bounds__(kThreads, kKinds == Kinds::WithDouble ? 1 : kBlocks<Rule>)
    update_kernel(const __grid_constant__ Table<kCapacity> table,
                  const __grid_constant__ OptimStep step) {
  const Part part = part_of_block(table, step);
  const OptimCoefficients coefficients = step.coefficients[table.first + part.index];
  if (coefficients.skip != 0) return;
  update_span<Rule, kKinds>(table.spans[part.index], coefficients, part);
}

// A thread's part of a sum of squares, and whether it met a value that is infinite or NaN.
struct Sum {
  double squares;
  bool is_infinite;
};

template <int kLanes, typename G>
__device__ __forceinline__ void square_vectors(const G* gradient, int from, int count,
                                               Compute<G> scale, Compute<G>& squares,
                                               Compute<G>& zeros) {
  constexpr int kUnroll = 4;
  constexpr int by = kThreads * kLanes;
  for (int at = from + static_cast<int>(threadIdx.x) * kLanes; at < count; at += by * kUnroll) {
    Values<G, kLanes> values[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (at + i * by < count) values[i] = load_values<G, kLanes>(gradient, at + i * by);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        const Compute<G> g = values[i].lane[lane], unscaled = g * scale;
        // 0 · g is NaN where g is infinite or NaN.
        zeros += g * Compute<G>(0);
        squares += unscaled * unscaled;
      }
    }
  }
}

template <typename G>
__device__ Sum square_part(const OptimSpan& span, const Part& part, double inverse_scale) {
  using C = Compute<G>;
  const G* gradient = static_cast<const G*>(span.gradient) + part.begin;
  const C scale = static_cast<C>(inverse_scale);
  C squares = 0, zeros = 0;
  constexpr int kLanes = kLanesOf16Bytes<G>;
  int whole = 0;
  if (fits<G, kLanes>(gradient)) {
    whole = part.count / kLanes * kLanes;
    square_vectors<kLanes>(gradient, 0, whole, scale, squares, zeros);
  }
  square_vectors<1>(gradient, whole, part.count, scale, squares, zeros);
  return {static_cast<double>(squares), zeros != C(0)};
}

__device__ __forceinline__ Sum square_span(const OptimSpan& span, const Part& part,
                                           double inverse_scale) {
  switch (span.gradient_kind) {
    case kTchExtensionDouble:
      return square_part<double>(span, part, inverse_scale);
    case kTchExtensionHalf:
      return square_part<__half>(span, part, inverse_scale);
    case kTchExtensionBFloat16:
      return square_part<__nv_bfloat16>(span, part, inverse_scale);
    default:
      return square_part<float>(span, part, inverse_scale);
  }
}

// Sums over a block, always in the same order. All threads get the result.
__device__ __forceinline__ Totals sum_of_block(double squares, double infinite) {
  __shared__ double of_warp[2][kThreads / kWarp];
  const auto add_over_warp = [](double value) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      value += __shfl_down_sync(kAllLanes, value, distance);
    }
    return value;
  };
  squares = add_over_warp(squares);
  infinite = add_over_warp(infinite);
  // Nobody may write before all have read what an earlier call left.
  __syncthreads();
  if (threadIdx.x % kWarp == 0) {
    of_warp[0][threadIdx.x / kWarp] = squares;
    of_warp[1][threadIdx.x / kWarp] = infinite;
  }
  __syncthreads();
  Totals totals = {0, 0};
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    totals.squares += of_warp[0][warp];
    totals.infinite += of_warp[1][warp];
  }
  return totals;
}

// Prepares the spans of a launch, with all threads of a block.
template <int kCapacity>
__device__ __forceinline__ void prepare_spans(const Table<kCapacity>& table, const OptimStep& step,
                                              const Totals& totals) {
  const bool skip = found_inf(step, totals);
  for (int index = threadIdx.x; index < table.count; index += blockDim.x) {
    prepare(step, table.spans[index], totals, skip, step.coefficients + table.first + index);
  }
  if (threadIdx.x == 0) report(step, totals);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    prepare_kernel(const __grid_constant__ Table<kCapacity> table,
                   const __grid_constant__ OptimStep step) {
  prepare_spans(table, step, totals_of(step));
}

// The last block of the last launch adds up what all blocks have found: always in the same order,
// whichever block is the last. `chunks` is the number of chunks up to the end of this launch.
template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    scan_kernel(const __grid_constant__ Table<kCapacity> table,
                const __grid_constant__ OptimStep step, bool is_last_launch) {
  const Part part = part_of_block(table, step);
  const Sum sum = square_span(table.spans[part.index], part, inverse_of(step.grad_scale));
  const Totals of_block = sum_of_block(sum.squares, sum.is_infinite ? 1 : 0);
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    step.partials[2 * part.chunk] = of_block.squares;
    step.partials[2 * part.chunk + 1] = of_block.infinite;
    __threadfence();
    is_last = is_last_launch && atomicAdd(step.ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  double squares = 0, infinite = 0;
  const int64_t chunks = step.chunks > 0 ? step.chunks : 1;
#pragma unroll 4
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    const double2 found = __ldcg(reinterpret_cast<const double2*>(step.partials) + chunk);
    squares += found.x;
    infinite += found.y;
  }
  const Totals totals = sum_of_block(squares, infinite);
  if (threadIdx.x == 0) {
    step.totals[0] = totals.squares;
    step.totals[1] = totals.infinite;
    *step.ticket = 0;
  }
  if (step.prepares != 0) prepare_spans(table, step, totals);
}

template <int kLanes, typename G>
__device__ __forceinline__ void rewrite_vectors(G* gradient, int from, int count, bool clamps,
                                                Compute<G> number) {
  constexpr int by = kThreads * kLanes;
  for (int at = from + static_cast<int>(threadIdx.x) * kLanes; at < count; at += by) {
    Values<G, kLanes> values = load_values<G, kLanes>(gradient, at);
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
      Compute<G>& g = values.lane[lane];
      // NaN stays NaN.
      if (clamps) {
        g = g < -number ? -number : g > number ? number : g;
      } else {
        g *= number;
      }
    }
    store_values<G, kLanes>(gradient, at, values);
  }
}

template <typename G>
__device__ __forceinline__ void rewrite_part(const OptimSpan& span, const Part& part, bool clamps,
                                             double number) {
  G* gradient = static_cast<G*>(span.gradient) + part.begin;
  const Compute<G> rounded = static_cast<Compute<G>>(number);
  constexpr int kLanes = kLanesOf16Bytes<G>;
  int whole = 0;
  if (fits<G, kLanes>(gradient)) {
    whole = part.count / kLanes * kLanes;
    rewrite_vectors<kLanes>(gradient, 0, whole, clamps, rounded);
  }
  rewrite_vectors<1>(gradient, whole, part.count, clamps, rounded);
}

template <int kCapacity>
__global__ void __launch_bounds__(kThreads)
    rewrite_kernel(const __grid_constant__ Table<kCapacity> table,
                   const __grid_constant__ OptimRewrite params) {
  const bool clamps = params.squares == nullptr;
  const double number = clamps ? params.max : clip_of(*params.squares, params.max);
  if (!clamps && number == 1) return;
  const Part part = part_of_block(table, params);
  const OptimSpan& span = table.spans[part.index];
  switch (span.gradient_kind) {
    case kTchExtensionDouble:
      return rewrite_part<double>(span, part, clamps, number);
    case kTchExtensionHalf:
      return rewrite_part<__half>(span, part, clamps, number);
    case kTchExtensionBFloat16:
      return rewrite_part<__nv_bfloat16>(span, part, clamps, number);
    default:
      return rewrite_part<float>(span, part, clamps, number);
  }
}

__global__ void store_kernel(const __grid_constant__ OptimStore params) {
  if (threadIdx.x < params.count) params.to[threadIdx.x] = params.values[threadIdx.x];
}

// Calls body(table, blocks, is_last) for each launch that the spans take.
template <int kCapacity, typename Params, typename Body>
void for_each_table(const Params& params, const Body& body) {
  static_assert(sizeof(Table<kCapacity>) + sizeof(Params) + 8 <=
                (kCapacity == kFew ? 4096 : 32764));
  for (int64_t first = 0; first < params.count; first += kCapacity) {
    const int64_t rest = params.count - first;
    const bool is_last = rest <= kCapacity;
    Table<kCapacity> table;
    table.count = static_cast<int32_t>(is_last ? rest : kCapacity);
    table.first = static_cast<int32_t>(first);
    memcpy(table.spans, params.spans + first, table.count * sizeof(OptimSpan));
    const int64_t end = is_last ? params.chunks : params.spans[first + kCapacity].begin;
    const int64_t blocks = end - table.spans[0].begin;
    body(table, static_cast<unsigned int>(blocks > 0 ? blocks : 1), is_last);
  }
}

// Calls body(table, blocks, is_last) with tables of one size.
template <typename Params, typename Body>
void for_tables(const Params& params, const Body& body) {
  if (params.count <= kFew) return for_each_table<kFew>(params, body);
  for_each_table<kMany>(params, body);
}

template <template <typename, typename> class Rule, Kinds kKinds>
void start_update_of(const OptimStep& params, cudaStream_t stream) {
  for_tables(params, [&](const auto& table, unsigned int blocks, bool) {
    update_kernel<Rule, kKinds><<<blocks, kThreads, 0, stream>>>(table, params);
  });
}

// Whether the gradients are directions of Muon, of weights of other kinds.
bool has_directions(const OptimStep& params) {
  return std::any_of(params.spans, params.spans + params.count, [](const OptimSpan& span) {
    return span.gradient_kind == kTchExtensionHalf && span.kind != kTchExtensionHalf &&
           span.rounded_kind != kTchExtensionHalf;
  });
}

template <template <typename, typename> class Rule>
void start_update(const OptimStep& params, cudaStream_t stream) {
  const bool has_double =
      std::any_of(params.spans, params.spans + params.count,
                  [](const OptimSpan& span) { return span.kind == kTchExtensionDouble; });
  has_double ? start_update_of<Rule, Kinds::WithDouble>(params, stream)
             : start_update_of<Rule, Kinds::Usual>(params, stream);
}

}  // namespace
}  // namespace tch_extension::optim

using namespace tch_extension;

extern "C" LaunchStatus tch_extension_optim_prepare_cuda(const OptimStep* params,
                                                         cudaStream_t stream) {
  optim::for_tables(*params, [&](const auto& table, unsigned int, bool) {
    optim::prepare_kernel<<<1, kThreads, 0, stream>>>(table, *params);
  });
  return launch_status("optim_prepare");
}

extern "C" LaunchStatus tch_extension_optim_scan_cuda(const OptimStep* params,
                                                      cudaStream_t stream) {
  // Several launches are prepared when all of them have been scanned.
  OptimStep step = *params;
  const bool is_one_launch = step.count <= optim::kMany;
  if (!is_one_launch) step.prepares = 0;
  optim::for_tables(step, [&](const auto& table, unsigned int blocks, bool is_last) {
    optim::scan_kernel<<<blocks, kThreads, 0, stream>>>(table, step, is_last);
  });
  const LaunchStatus status = launch_status("optim_scan");
  if (status.error != nullptr || is_one_launch || params->prepares == 0) return status;
  return tch_extension_optim_prepare_cuda(params, stream);
}

extern "C" LaunchStatus tch_extension_optim_update_cuda(const OptimStep* params,
                                                        cudaStream_t stream) {
  switch (params->rule) {
    case OptimRule::AdamW:
      optim::start_update<optim::AdamW>(*params, stream);
      break;
    case OptimRule::AmsGrad:
      optim::start_update<optim::AmsGrad>(*params, stream);
      break;
    case OptimRule::Sgd:
    case OptimRule::Muon:
      optim::has_directions(*params)
          ? optim::start_update_of<optim::Sgd, optim::Kinds::FromHalf>(*params, stream)
          : optim::start_update<optim::Sgd>(*params, stream);
      break;
  }
  return launch_status("optim_update");
}

extern "C" LaunchStatus tch_extension_optim_rewrite_cuda(const OptimRewrite* params,
                                                         cudaStream_t stream) {
  optim::for_tables(*params, [&](const auto& table, unsigned int blocks, bool) {
    optim::rewrite_kernel<<<blocks, kThreads, 0, stream>>>(table, *params);
  });
  return launch_status("optim_rewrite");
}

extern "C" LaunchStatus tch_extension_optim_store_cuda(const OptimStore* params,
                                                       cudaStream_t stream) {
  optim::store_kernel<<<1, kWarp, 0, stream>>>(*params);
  return launch_status("optim_store");
}
