// The forward in one kernel; persistent.h says how blocks share it.

#include "persistent_launch.h"

namespace tch_extension {
namespace {

// Steps whose input gates are on their way.
constexpr int kAhead = 4;

// W_h of a warp in registers, as tensor cores take it: kTiles tiles of each gate.
template <typename T, int kTiles>
struct TensorCores {
  using Element = T;
  using Gates = float;
  static constexpr int kMostThreads = kTiles > 8 ? 384 : 64 * kTiles;

  static int weight_bytes(int, int) { return 0; }

  __device__ void load(const LltmPersistentForward& params, const Place& place, void*) {
    const T* weight = static_cast<const T*>(params.weight);
    const int hidden = static_cast<int>(params.hidden);
    auto at = [&](int gate, int column, int k) {
      const bool valid = column < hidden && k < hidden;
      return valid
                 ? bits_of(weight[(static_cast<int64_t>(gate) * hidden + column) * params.weight_stride + k])
                 : 0u;
    };
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
          const int column = place.first_column + place.lane / 4 + part % 2 * 8;
          const int k = (place.split * kTiles + tile) * kTile + place.lane % 4 * 2 + part / 2 * 8;
          weights[tile][gate][part] = at(gate, column, k) | at(gate, column, k + 1) << 16;
        }
      }
      few_at_a_time();
    }
  }

  // Of h in shared memory: [columns / 8, row, 8], even rows first, so that what the lanes of a warp send to a
  // block lies side by side, and so does what they read.
  static __host__ __device__ int h_bytes(int padded) { return kRows * padded * static_cast<int>(sizeof(T)); }
  static __device__ int h_at(int row, int column, int) {
    return (column / 8 * kRows + row % 2 * 4 + row / 2) * 16 + column % 8 * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void multiply(float (&sums)[kGates][4], const unsigned char* h,
                                           const Place& place) const {
    const int column = place.split * (kTiles * kTile) + place.lane / 8 * 8;
    const uint32_t address = shared_address(h) + h_at(place.lane % 8, column, 0);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      uint32_t b[4];
      load_matrices(b, address + tile * (kTile / 8 * kRows * 16));
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) multiply_add<T>(sums[gate], weights[tile][gate], b[0], b[1]);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate)
        multiply_add<T>(sums[gate], weights[tile + 1][gate], b[2], b[3]);
    }
  }

  // Eight lanes have eight neighbouring columns of a row. Each gathers them all, and sends them to one block,
  // or to two of sixteen.
  __device__ __forceinline__ void push(uint32_t to, uint32_t barrier, T value, const Place& place) const {
    const uint32_t mine = bits_of(value);
    const uint32_t other = __shfl_xor_sync(~0u, mine, 4);
    const uint32_t pair = place.lane & 4 ? other | mine << 16 : mine | other << 16;
    const uint32_t next = __shfl_xor_sync(~0u, pair, 8);
    const uint2 four = place.lane & 8 ? make_uint2(next, pair) : make_uint2(pair, next);
    const uint2 rest = {__shfl_xor_sync(~0u, four.x, 16), __shfl_xor_sync(~0u, four.y, 16)};
    const uint4 all = place.lane & 16 ? make_uint4(rest.x, rest.y, four.x, four.y)
                                      : make_uint4(four.x, four.y, rest.x, rest.y);
    const uint32_t block = place.lane / 4;
    if (block < place.cluster) send(in_block(to, block), in_block(barrier, block), all);
    if (place.cluster > 8) send(in_block(to, block + 8), in_block(barrier, block + 8), all);
  }

  // Where a lane sends what it has gathered: the first of the eight columns.
  static __device__ int pushed(int column) { return column & ~7; }

  uint32_t weights[kTiles][kGates][4];
};

// W_h of a block in shared memory, [3, columns, H'], and one multiplication after the other: for the kinds
// whose products tensor cores would round.
template <typename T>
struct PlainProduct {
  using Element = T;
  using Gates = T;
  static constexpr int kMostThreads = 128;

  static __host__ __device__ int row(int padded) { return padded + 16 / static_cast<int>(sizeof(T)); }
  static int weight_bytes(int columns, int padded) {
    return kGates * columns * row(padded) * static_cast<int>(sizeof(T));
  }

  __device__ void load(const LltmPersistentForward& params, const Place& place, void* memory) {
    const int hidden = static_cast<int>(params.hidden);
    columns = blockDim.x / (kWarp * kSplits) * kTile;
    padded = columns * params.cluster;
    weights = static_cast<T*>(memory);
    const T* from = static_cast<const T*>(params.weight);
    const int first = static_cast<int>(place.rank) * columns;
    for (int at = threadIdx.x; at < kGates * columns * padded; at += blockDim.x) {
      const int k = at % padded, gate = at / padded / columns, column = first + at / padded % columns;
      const bool valid = k < hidden && column < hidden;
      weights[at / padded * row(padded) + k] =
          valid ? from[(static_cast<int64_t>(gate) * hidden + column) * params.weight_stride + k] : T(0);
    }
  }

  // 16 bytes more for each row, so that the same column of all rows lies in different banks.
  static __host__ __device__ int h_bytes(int padded) {
    return kRows * row(padded) * static_cast<int>(sizeof(T));
  }
  static __device__ int h_at(int of_row, int column, int padded) {
    return (of_row * row(padded) + column) * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void multiply(T (&sums)[kGates][4], const unsigned char* h,
                                           const Place& place) const {
    using Vector = tch_extension::Vector<T, kLanesOf16Bytes<T>>;
    const int terms = padded / kSplits, begin = place.split * terms;
    const T* h0 = reinterpret_cast<const T*>(h + h_at(place.lane % 4 * 2, begin, padded));
    const T* h1 = h0 + row(padded);
    const T* w = weights + (place.tile * kTile + place.lane / 4) * row(padded) + begin;
    auto at = [](const T* from) { return *reinterpret_cast<const Vector*>(from); };
    for (int k = 0; k < terms; k += kLanesOf16Bytes<T>) {
      const Vector left = at(h0 + k), right = at(h1 + k);
#pragma unroll
      for (int gate = 0; gate < kGates; ++gate) {
        const Vector upper = at(w + gate * columns * row(padded) + k);
        const Vector lower = at(w + (gate * columns + 8) * row(padded) + k);
#pragma unroll
        for (int term = 0; term < kLanesOf16Bytes<T>; ++term) {
          sums[gate][0] += upper.lane[term] * left.lane[term];
          sums[gate][1] += upper.lane[term] * right.lane[term];
          sums[gate][2] += lower.lane[term] * left.lane[term];
          sums[gate][3] += lower.lane[term] * right.lane[term];
        }
      }
    }
  }

  __device__ __forceinline__ void push(uint32_t to, uint32_t barrier, T value, const Place& place) const {
    for (uint32_t block = 0; block < place.cluster; ++block) {
      send(in_block(to, block), in_block(barrier, block), value);
    }
  }

  static __device__ int pushed(int column) { return column; }

  T* weights;
  int columns, padded;
};

// Shared memory: h before and behind a step; partial sums of two steps; input gates of the next steps; bias;
// weights.
template <typename Product>
struct Layout {
  using G = typename Product::Gates;
  static constexpr int kArrivals = 16;

  __host__ __device__ Layout(int threads, int cluster) {
    const int gates = kGates * threads * static_cast<int>(sizeof(G));
    padded = threads / (kWarp * kSplits) * kTile * cluster;
    partials = kArrivals + 2 * Product::h_bytes(padded);
    ring = partials + 2 * kSplits * gates;
    bias = ring + kAhead * gates;
    weights = bias + gates;
  }
  int padded, partials, ring, bias, weights;
};

// S is the state's type. Indices are 32 bits wide: longer sequences take another path.
template <typename S, typename Product>
__global__ void __launch_bounds__(Product::kMostThreads)
    lltm_persistent_forward(const LltmPersistentForward params) {
#if __CUDA_ARCH__ >= 900
  using std::tanh;
  using T = typename Product::Element;
  using G = typename Product::Gates;
  extern __shared__ __align__(128) unsigned char shared[];
  const int threads = blockDim.x;
  const Layout<Product> layout(threads, params.cluster);
  const Place place(params.cluster);
  const uint32_t hidden = static_cast<uint32_t>(params.hidden);
  const int steps = static_cast<int>(params.steps);
  unsigned char* h = shared + Layout<Product>::kArrivals;
  const uint32_t arrivals = shared_address(shared);
  const uint32_t bytes_of_h = kRows * layout.padded * sizeof(T);

  // Of its four sums of a gate a lane finishes one: that of the index `split`.
  const int row = place.lane % 4 * 2 + place.split % 2;
  const int column = place.first_column + place.lane / 4 + place.split / 2 * 8;
  const uint32_t first_row = blockIdx.x / params.cluster * kRows;
  const uint32_t batch = static_cast<uint32_t>(params.batch);
  const bool valid = first_row + row < batch && column < hidden;
  const uint32_t step_size = batch * hidden;
  const uint32_t first = (first_row + row) * hidden + column;
  const uint32_t first_gate = first + 2 * (first_row + row) * hidden;

  // Each thread reads what it has copied itself, so that no barrier is needed.
  G* ring = reinterpret_cast<G*>(shared + layout.ring) + threadIdx.x;
  auto fetch = [&](int step, uint32_t from) {
    const G* gates = static_cast<const G*>(params.input_gates);
    const bool wanted = valid && step < steps;
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      copy_async(ring + (step % kAhead * kGates + gate) * threads,
                 gates + (wanted ? from + gate * hidden : 0), wanted);
    }
    commit_copies();
  };
  for (int step = 0; step < kAhead; ++step) fetch(step, first_gate + step * kGates * step_size);

  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) init_arrival(arrivals + 8 * buffer);
    publish_arrivals();
  }
  for (int at = threadIdx.x; at < kRows * layout.padded; at += threads) {
    const int of_row = at / layout.padded, k = at % layout.padded;
    const uint32_t from = first_row + of_row;
    *reinterpret_cast<T*>(h + Product::h_at(of_row, k, layout.padded)) =
        from < batch && k < hidden ? static_cast<const T*>(params.h0)[from * hidden + k] : T(0);
  }
  G* bias = reinterpret_cast<G*>(shared + layout.bias) + threadIdx.x;
#pragma unroll
  for (int gate = 0; gate < kGates; ++gate) {
    const bool has = params.bias != nullptr && column < hidden;
    bias[gate * threads] = has ? static_cast<const G*>(params.bias)[gate * hidden + column] : G(0);
  }
  G c = valid ? static_cast<G>(static_cast<const S*>(params.c0)[first]) : G(0);
  Product product;
  product.load(params, place, shared + layout.weights);
  __syncthreads();
  // Behind a barrier, which racecheck asks for, and before anybody may send.
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < 2; ++buffer) announce(arrivals + 8 * buffer, bytes_of_h);
  }
  __syncwarp();
  cluster_barrier();

  // Partial sums, [2, tile, gate, sum, split, lane]: each warp writes its split of all, and reads all of its
  // sum. Two buffers in turn, so that one barrier a step is enough.
  const int all_partials = kSplits * kGates * threads;
  G* partials = reinterpret_cast<G*>(shared + layout.partials) + place.tile * (kGates * 4 * kSplits * kWarp) +
                place.lane;
  const uint32_t h_bytes = Product::h_bytes(layout.padded);
  const uint32_t to = shared_address(h) + Product::h_at(row, Product::pushed(column), layout.padded);
  uint32_t at = first, at_gate = first_gate;
  for (int step = 0; step < steps; ++step) {
    const int buffer = step % 2;
    if (step > 0) {
      wait_for_arrival(arrivals + 8 * buffer, (step - 1) / 2 % 2);
      // For the step after the next: nobody sends for it before this block has sent for the next.
      if (threadIdx.x == 0) announce(arrivals + 8 * buffer, bytes_of_h);
    }
    G sums[kGates][4] = {};
    product.multiply(sums, h + buffer * h_bytes, place);

    G* written = partials + buffer * all_partials + place.split * kWarp;
    const G* read = partials + buffer * all_partials + place.split * (kSplits * kWarp);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
#pragma unroll
      for (int of = 0; of < 4; ++of) written[(gate * 4 + of) * kSplits * kWarp] = sums[gate][of];
    }
    G gates[kGates];
    wait_for_copies<kAhead - 1>();
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      gates[gate] = ring[(step % kAhead * kGates + gate) * threads] + bias[gate * threads];
    }
    barrier_of(1 + place.tile, kSplits * kWarp);
#pragma unroll
    for (int gate = 0; gate < kGates; ++gate) {
      const G* parts = read + gate * 4 * kSplits * kWarp;
      gates[gate] += (parts[0] + parts[kWarp]) + (parts[2 * kWarp] + parts[3 * kWarp]);
    }
    const G i = Activation<T, G>::of_gate(gates[0]), o = Activation<T, G>::of_gate(gates[1]);
    c += Activation<T, G>::of_candidate(gates[2]) * i;
    const G new_h = tanh(c) * o;
    if (step + 1 < steps) {
      // Rows and columns that are padding stay zeros.
      product.push(to + (1 - buffer) * h_bytes, arrivals + 8 * (1 - buffer),
                   valid ? static_cast<T>(new_h) : T(0), place);
    }
    fetch(step + kAhead, at_gate + kAhead * kGates * step_size);
    if (valid) {
      static_cast<S*>(params.output)[at] = static_cast<S>(new_h);
      if (params.c_stride != 0) static_cast<S*>(params.c)[at] = static_cast<S>(c);
      if (params.activations != nullptr) {
        S* activations = static_cast<S*>(params.activations);
        activations[at_gate] = static_cast<S>(i);
        activations[at_gate + hidden] = static_cast<S>(o);
        activations[at_gate + 2 * hidden] = static_cast<S>(gates[2]);
      }
    }
    at += step_size;
    at_gate += kGates * step_size;
  }
  if (valid && params.c_stride == 0) static_cast<S*>(params.c)[first] = static_cast<S>(c);
#endif
}

template <typename S, typename Product>
const char* start(const LltmPersistentForward& params, int threads, cudaStream_t stream) {
  const Layout<Product> layout(threads, params.cluster);
  const int bytes = layout.weights + Product::weight_bytes(layout.padded / params.cluster, layout.padded);
  return start_clusters<lltm_persistent_forward<S, Product>>(params, threads, bytes, stream);
}

struct Forward {
  template <typename S, typename T>
  const char* run() const {
    const int padded = padded_size(params.hidden, params.cluster),
              threads = threads_of(padded, params.cluster);
    if constexpr (sizeof(T) > 2) {
      return padded == 128 ? start<S, PlainProduct<T>>(params, threads, stream) : kNoKernel;
    } else {
      switch (padded) {
        case 128:
          return start<S, TensorCores<T, 2>>(params, threads, stream);
        case 256:
          return start<S, TensorCores<T, 4>>(params, threads, stream);
        case 512:
          return start<S, TensorCores<T, 8>>(params, threads, stream);
        case 768:
          return start<S, TensorCores<T, 12>>(params, threads, stream);
        default:
          return kNoKernel;
      }
    }
  }

  const LltmPersistentForward& params;
  cudaStream_t stream;
};

// How many clusters of `cluster` blocks, as large as they come in the half kinds, the device runs at a time.
// None, where CUDA says so with an error, as it may of clusters of 16.
template <int kTiles>
int clusters_at_a_time(int32_t cluster) {
  using Product = TensorCores<__half, kTiles>;
  constexpr auto kKernel = lltm_persistent_forward<__half, Product>;
  cudaFuncAttributes code = {};
  cudaError_t error = cudaFuncGetAttributes(&code, kKernel);
  // What an older architecture's code becomes on a new GPU is empty.
  if (error == cudaSuccess && code.ptxVersion < 90) return 0;
  const int threads = threads_of(kTiles * kTile * kSplits, cluster);
  const int bytes = Layout<Product>(threads, cluster).weights;
  if (error == cudaSuccess) error = allow<kKernel>();
  int clusters = 0;
  const ClusterLaunch launch(threads, bytes, cluster, kRows, nullptr);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kKernel, &launch.config);
  if (error == cudaSuccess) return clusters;
  // Whoever looks for a failure of a launch must not find one of a question.
  (void)cudaGetLastError();
  return 0;
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus tch_extension_lltm_persistent_forward_cuda(
    const LltmPersistentForward* params, cudaStream_t stream) {
  using namespace tch_extension;
  return {"lltm_persistent_forward", for_kinds(params->kind, params->product_kind, Forward{*params, stream})};
}

// Of the current device, which `device` has to be: how many clusters of 8 blocks, and of 16, run at a time;
// zeros where the kernels cannot.
extern "C" const char* tch_extension_lltm_persistent_device(int32_t device, int64_t* clusters) {
  int major = 0;
  clusters[0] = clusters[1] = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  // Measured nowhere else, and others have less shared memory.
  if (major != 9) return nullptr;
  clusters[0] = tch_extension::clusters_at_a_time<8>(8);
  clusters[1] = tch_extension::clusters_at_a_time<12>(16);
  return nullptr;
}
