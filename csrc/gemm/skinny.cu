// The operand with the many rows (the long one) is read once. Where its K is contiguous, a warp or a block
// computes a row's sums; where the rows are, a block computes some rows' side by side, and up to 8 blocks of
// a cluster share K.
#include <cooperative_groups.h>

#include <atomic>

#include "skinny.h"

namespace tch_extension::gemm {
namespace {

constexpr int kMostShort = 4;

// out[r, s] = Σ_k long[r, k] short[s, k] + bias[r, s]: the product, or its transpose.
struct Skinny {
  struct Factor {
    const void* data;
    int64_t row;
    int64_t inner;
    int64_t batch;
  };
  Factor many;
  Factor few;
  Factor bias;
  Factor out;
  int64_t rows;
  int64_t inner;
  int32_t shorts;
  int32_t relu;
};

template <typename T>
__device__ __forceinline__ const T* of_batch(const Skinny::Factor& factor) {
  return static_cast<const T*>(factor.data) + blockIdx.z * factor.batch;
}

template <typename T>
__device__ __forceinline__ void finish(const Skinny& skinny, int64_t row, int s, Compute<T> sum) {
  using C = Compute<T>;
  const auto& [data, bias_row, bias_short, bias_batch] = skinny.bias;
  if (data != nullptr) sum += static_cast<C>(of_batch<T>(skinny.bias)[row * bias_row + s * bias_short]);
  // Not max: NaN stays.
  if (skinny.relu && sum < 0) sum = 0;
  T* out = const_cast<T*>(of_batch<T>(skinny.out));
  out[row * skinny.out.row + s * skinny.out.inner] = static_cast<T>(sum);
}

// kRows rows of a team whose K is contiguous: kLanes neighbours a thread where both factors are aligned to
// that; otherwise one, so that neighbouring threads read neighbours of either, wherever a row begins.
template <typename T, int kShorts, int kLanes, int kRows>
struct RowSums {
  using C = Compute<T>;

  C sum[kRows][kShorts] = {};

  template <int kAhead>
  __device__ __forceinline__ void add_some(const Skinny& skinny, const T* const (&rows)[kRows], const T* few,
                                           int first, int step) {
    const int inner = static_cast<int>(skinny.inner);
    Vector<T, kLanes> left[kAhead][kRows];
    Vector<T, kLanes> right[kAhead][kShorts];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = first + i * step;
      if (k >= inner) {
        // In place of a loop of its own for the last few, whose loads would wait for one another.
#pragma unroll
        for (int r = 0; r < kRows; ++r) left[i][r] = Vector<T, kLanes>{};
#pragma unroll
        for (int s = 0; s < kShorts; ++s) right[i][s] = Vector<T, kLanes>{};
        continue;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) left[i][r] = *reinterpret_cast<const Vector<T, kLanes>*>(rows[r] + k);
#pragma unroll
      for (int s = 0; s < kShorts; ++s) {
        const int at = s < skinny.shorts ? s : 0;
        // With lanes, K of both is contiguous.
        const T* from = few + at * skinny.few.row + (kLanes > 1 ? k : k * skinny.few.inner);
        right[i][s] = *reinterpret_cast<const Vector<T, kLanes>*>(from);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int s = 0; s < kShorts; ++s) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            sum[r][s] += static_cast<C>(left[i][r].lane[lane]) * static_cast<C>(right[i][s].lane[lane]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void add(const Skinny& skinny, int64_t first_row, int member, int team) {
    const T* few = of_batch<T>(skinny.few);
    const T* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first_row + r < skinny.rows ? first_row + r : skinny.rows - 1;
      rows[r] = of_batch<T>(skinny.many) + row * skinny.many.row;
    }
    const int inner = static_cast<int>(skinny.inner);
    // So many loads of each row are under way before the first is used.
    constexpr int kAhead = kLanes == 1 ? 8 / kRows : kShorts <= 2 && kRows == 1 ? 4 : 1;
    const int step = team * kLanes;
    int k = member * kLanes;
    for (; k < inner; k += kAhead * step) add_some<kAhead>(skinny, rows, few, k, step);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int s = 0; s < kShorts; ++s) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) sum[r][s] += __shfl_xor_sync(~0u, sum[r][s], step);
      }
    }
  }
};

constexpr int kRowsOfWarp = 4;

// Each warp computes some rows.
template <typename T, int kShorts, int kLanes>
__global__ void __launch_bounds__(kThreads) skinny_rows_kernel(Skinny skinny) {
  const int lane = threadIdx.x % 32;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  RowSums<T, kShorts, kLanes, kRowsOfWarp> sums;
  sums.add(skinny, warp * kRowsOfWarp, lane, 32);
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int64_t row = warp * kRowsOfWarp + r;
#pragma unroll
    for (int s = 0; s < kShorts; ++s) {
      if (lane == s && s < skinny.shorts && row < skinny.rows) finish<T>(skinny, row, s, sums.sum[r][s]);
    }
  }
}

constexpr int kMostTeam = 1024;

// Each block computes a row.
template <typename T, int kShorts, int kLanes>
__global__ void __launch_bounds__(kMostTeam) skinny_row_kernel(Skinny skinny) {
  using C = Compute<T>;
  __shared__ C parts[kMostTeam / 32][kShorts];
  const int member = threadIdx.x;
  RowSums<T, kShorts, kLanes, 1> sums;
  sums.add(skinny, blockIdx.x, member, blockDim.x);
  if (member % 32 == 0) {
#pragma unroll
    for (int s = 0; s < kShorts; ++s) parts[member / 32][s] = sums.sum[0][s];
  }
  __syncthreads();
  if (member >= skinny.shorts) return;
  C total = 0;
  for (int part = 0; part < blockDim.x / 32; ++part) total += parts[part][member];
  finish<T>(skinny, blockIdx.x, member, total);
}

constexpr int kColumnThreads = 512;

template <typename T, int kShorts, int kLanes, int kAhead>
__device__ __forceinline__ void add_columns(const Skinny& skinny, const T* many, const T* few, int first,
                                            int step, Compute<T> (&sum)[kShorts][kLanes]) {
  using C = Compute<T>;
  const int inner = static_cast<int>(skinny.inner);
  Vector<T, kLanes> left[kAhead];
  T right[kAhead][kShorts];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int k = first + i * step;
    const bool exists = k < inner;
    left[i] = exists ? *reinterpret_cast<const Vector<T, kLanes>*>(many + k * skinny.many.inner)
                     : Vector<T, kLanes>{};
#pragma unroll
    for (int s = 0; s < kShorts; ++s) {
      const int at = s < skinny.shorts ? s : 0;
      right[i][s] = exists ? few[at * skinny.few.row + k * skinny.few.inner] : T(0);
    }
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
#pragma unroll
    for (int s = 0; s < kShorts; ++s) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        sum[s][lane] += static_cast<C>(left[i].lane[lane]) * static_cast<C>(right[i][s]);
      }
    }
  }
}

// Rows that are neighbours in memory: a block has kAcross · kLanes of them, and cuts K between its threads
// and those of the other blocks of its cluster.
template <typename T, int kShorts, int kLanes, int kAcross>
__global__ void __launch_bounds__(kColumnThreads) skinny_columns_kernel(Skinny skinny) {
  namespace cg = cooperative_groups;
  using C = Compute<T>;
  constexpr int kTile = kAcross * kLanes;
  const int across = threadIdx.x % kAcross;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTile + across * kLanes;
  const T* few = of_batch<T>(skinny.few);
  const T* many = of_batch<T>(skinny.many) + (first < skinny.rows ? first : 0);
  const int inner = static_cast<int>(skinny.inner);
  C sum[kShorts][kLanes] = {};
  const int down = blockDim.x / kAcross;
  const int step = gridDim.y * down;
  constexpr int kAhead = kLanes == 1 ? 8 : kShorts <= 2 ? 4 : 2;
  int k = blockIdx.y * down + threadIdx.x / kAcross;
  for (; k < inner; k += kAhead * step)
    add_columns<T, kShorts, kLanes, kAhead>(skinny, many, few, k, step, sum);
  // Within a warp, then within the block, then within the cluster: an order that sizes decide.
#pragma unroll
  for (int s = 0; s < kShorts; ++s) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
#pragma unroll
      for (int step = 16; step >= kAcross; step /= 2)
        sum[s][lane] += __shfl_xor_sync(~0u, sum[s][lane], step);
    }
  }
  const int warps = blockDim.x / 32;
  __shared__ C parts[kColumnThreads / 32][kShorts][kTile];
  __shared__ C block[kShorts][kTile];
  if (threadIdx.x % 32 < kAcross) {
#pragma unroll
    for (int s = 0; s < kShorts; ++s) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        parts[threadIdx.x / 32][s][across * kLanes + lane] = sum[s][lane];
    }
  }
  __syncthreads();
  constexpr int kValues = kShorts * kTile;
  for (int value = threadIdx.x; value < kValues; value += blockDim.x) {
    C total = 0;
    for (int warp = 0; warp < warps; ++warp) total += parts[warp][value / kTile][value % kTile];
    block[value / kTile][value % kTile] = total;
  }
#if __CUDA_ARCH__ >= 900
  const bool shares = gridDim.y > 1;
  if (shares) cg::this_cluster().sync();
#else
  __syncthreads();
#endif
  if (blockIdx.y == 0) {
    for (int value = threadIdx.x; value < kValues; value += blockDim.x) {
      const int s = value / kTile;
      const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile + value % kTile;
      C total = block[s][value % kTile];
#if __CUDA_ARCH__ >= 900
      for (unsigned int rank = 1; rank < gridDim.y; ++rank) {
        total += *cg::this_cluster().map_shared_rank(&block[s][value % kTile], rank);
      }
#endif
      if (s < skinny.shorts && row < skinny.rows) finish<T>(skinny, row, s, total);
    }
  }
#if __CUDA_ARCH__ >= 900
  // Nobody leaves while its sums are being read.
  if (shares) cg::this_cluster().sync();
#endif
}

// Of the orientation that has the few columns as `few`.
Skinny skinny_of(const Product& product) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = product;
  Skinny skinny{};
  skinny.inner = k;
  skinny.relu = relu;
  const Skinny::Factor left{lhs.data, lhs.row, lhs.column, lhs.batch};
  const Skinny::Factor right{rhs.data, rhs.column, rhs.row, rhs.batch};
  if (n <= m) {
    skinny.many = left;
    skinny.few = right;
    skinny.bias = {bias.data, bias.row, bias.column, bias.batch};
    skinny.out = {out, n, 1, m * n};
    skinny.rows = m;
    skinny.shorts = static_cast<int32_t>(n);
  } else {
    skinny.many = right;
    skinny.few = left;
    skinny.bias = {bias.data, bias.column, bias.row, bias.batch};
    skinny.out = {out, 1, n, m * n};
    skinny.rows = n;
    skinny.shorts = static_cast<int32_t>(m);
  }
  return skinny;
}

bool is_by_rows(const Skinny& skinny) { return skinny.inner == 1 || skinny.many.inner == 1; }
bool is_by_columns(const Skinny& skinny) { return skinny.rows == 1 || skinny.many.row == 1; }

template <typename T>
bool is_even(const Skinny::Factor& factor, int64_t stride) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  return is_aligned_to_16(factor.data) && stride % kLanes == 0 && factor.batch % kLanes == 0;
}

int64_t over(int64_t size, int64_t part) { return (size + part - 1) / part; }

template <typename T, int kShorts, int kLanes>
void start_rows_by(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int64_t kFewThreads = 132 * 512;  // leave multiprocessors idle
  constexpr int64_t kManyRows = 132 * 32;
  constexpr int64_t kSteps = 8;
  const int64_t rows = skinny.rows * batch;
  const auto in_batch = static_cast<unsigned int>(batch);
  if (rows >= kManyRows && skinny.inner < 1024 * kLanes) {
    const dim3 blocks(static_cast<unsigned int>(over(skinny.rows, kThreads / 32 * kRowsOfWarp)), 1, in_batch);
    skinny_rows_kernel<T, kShorts, kLanes><<<blocks, kThreads, 0, stream>>>(skinny);
    return;
  }
  // Up to kSteps of K for each thread, fewer where that makes too few threads.
  int threads = 32;
  while (threads < kMostTeam && (threads * 2 * kSteps * kLanes <= skinny.inner ||
                                 (rows * threads < kFewThreads && threads * 2 * kLanes <= skinny.inner))) {
    threads *= 2;
  }
  const dim3 blocks(static_cast<unsigned int>(skinny.rows), 1, in_batch);
  skinny_row_kernel<T, kShorts, kLanes><<<blocks, threads, 0, stream>>>(skinny);
}

template <typename T, int kShorts>
void start_rows(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  const bool is_whole = skinny.few.inner == 1 && skinny.inner % kLanes == 0;
  if (is_whole && is_even<T>(skinny.many, skinny.many.row) && is_even<T>(skinny.few, skinny.few.row)) {
    start_rows_by<T, kShorts, kLanes>(skinny, batch, stream);
  } else {
    start_rows_by<T, kShorts, 1>(skinny, batch, stream);
  }
}

// Whether the code that the current device runs knows clusters: it may have been compiled for an older one.
bool has_clusters() {
  constexpr int kMostDevices = 64;
  static std::atomic<int8_t> known[kMostDevices];
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMostDevices) return false;
  if (known[device] == 0) {
    int major = 0;
    cudaFuncAttributes code{};
    const bool has =
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
        cudaFuncGetAttributes(&code, skinny_columns_kernel<float, 1, 1, 32>) == cudaSuccess && major >= 9 &&
        code.ptxVersion >= 90;
    known[device] = has ? 1 : -1;
  }
  return known[device] == 1;
}

template <typename T, int kShorts, int kLanes>
void start_columns_by(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int kAcross = kLanes > 1 ? 4 : 32;
  const int64_t tiles = over(skinny.rows, kAcross * kLanes);
  // Each thread has about kSteps of K to go through: first a block has more threads, then the cluster more
  // blocks, as long as there are multiprocessors for them.
  constexpr int64_t kSteps = 8;
  constexpr int64_t kProcessors = 132;
  int threads = 64;
  while (threads < kColumnThreads && threads / kAcross * kSteps < skinny.inner) threads *= 2;
  unsigned int shares = 1;
  while (shares < 8 && tiles * batch * shares * threads < kProcessors * kColumnThreads * 2 &&
         threads / kAcross * kSteps * shares < skinny.inner && has_clusters()) {
    shares *= 2;
  }
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {1, shares, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned int>(tiles), shares, static_cast<unsigned int>(batch));
  config.blockDim = dim3(static_cast<unsigned int>(threads));
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = shares > 1 ? 1 : 0;
  cudaLaunchKernelEx(&config, skinny_columns_kernel<T, kShorts, kLanes, kAcross>, skinny);
}

template <typename T, int kShorts>
void start_columns(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  if (is_even<T>(skinny.many, skinny.many.inner) && skinny.rows % kLanes == 0) {
    start_columns_by<T, kShorts, kLanes>(skinny, batch, stream);
  } else {
    start_columns_by<T, kShorts, 1>(skinny, batch, stream);
  }
}

template <typename T, int kShorts>
void start(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  is_by_rows(skinny) ? start_rows<T, kShorts>(skinny, batch, stream)
                     : start_columns<T, kShorts>(skinny, batch, stream);
}

}  // namespace

bool skinny_product_can(const Product& product) {
  constexpr int64_t kMostBlocks = 65535;
  constexpr int64_t kMost = INT32_MAX - 65536;  // a step more must not leave 32 bits
  if (product.m > kMostShort && product.n > kMostShort) return false;
  const Skinny skinny = skinny_of(product);
  return (is_by_rows(skinny) || is_by_columns(skinny)) && product.batch <= kMostBlocks && product.k <= kMost;
}

bool skinny_product_is_faster(const Product& product) {
  const int64_t narrow = product.m < product.n ? product.m : product.n;
  if (narrow > kMostShort || product.k < 32 || !skinny_product_can(product)) return false;
  const Skinny skinny = skinny_of(product);
  const bool is_half = product.kind == kTchExtensionHalf || product.kind == kTchExtensionBFloat16;
  const bool has_plan = product.bias.data != nullptr;
  // cuBLAS has good kernels for one row of a matrix whose columns are not contiguous; in the half kinds,
  // single values of such are too short to be read fast.
  if (!is_by_rows(skinny)) {
    constexpr int64_t kMany = 4096;
    constexpr int64_t kLongest = 8192;
    if (narrow == 1 || product.k < 64 || product.k > kLongest) return false;
    if (is_half) return narrow == 2 && has_plan && is_even<__half>(skinny.many, skinny.many.inner);
    return narrow == 2 || (has_plan && skinny.rows * product.batch <= kMany);
  }
  if (!is_half) return true;
  // And tensor cores for the half kinds; single values of those are too short to be read fast, if there are
  // many.
  constexpr int64_t kMuch = 1 << 22;
  const bool is_whole =
      product.k % kLanesOf16Bytes<__half> == 0 && is_even<__half>(skinny.many, skinny.many.row);
  return narrow <= 2 && (is_whole || skinny.rows * product.batch <= kMuch / product.k);
}

LaunchStatus skinny_product(const Product& product, cudaStream_t stream) {
  const Skinny skinny = skinny_of(product);
  for_kind(product.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (skinny.shorts) {
      case 1:
        return start<T, 1>(skinny, product.batch, stream);
      case 2:
        return start<T, 2>(skinny, product.batch, stream);
      default:
        return start<T, 4>(skinny, product.batch, stream);
    }
  });
  return launch_status("skinny_product");
}

}  // namespace tch_extension::gemm
