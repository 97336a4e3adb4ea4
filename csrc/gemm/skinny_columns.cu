// Narrow products whose long factor has adjacent rows at adjacent addresses (its row stride is 1).
// A block computes several adjacent rows, and up to 8 blocks of a cluster split K between them.
#include <cooperative_groups.h>

#include <atomic>

#include "skinny_operands.h"

namespace tch_extension::gemm {
namespace {

constexpr int kColumnThreads = 512;

// The number of loads that a thread has in flight before it uses the first.
template <int kLanes>
constexpr int kColumnsAhead = kLanes == 1 ? 8 : 4;

template <typename T, int kShorts, int kLanes, int kAhead>
__device__ __forceinline__ void add_columns(const Skinny& skinny, const T* many, const T* few,
                                            int first, int step,
                                            Compute<T> (&sum)[kShorts][kLanes]) {
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

// A block computes kAcross · kLanes adjacent rows. K is split between its threads and those of the
// other blocks of its cluster.
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
  constexpr int kAhead = kColumnsAhead<kLanes>;
  int k = blockIdx.y * down + threadIdx.x / kAcross;
  for (; k < inner; k += kAhead * step)
    add_columns<T, kShorts, kLanes, kAhead>(skinny, many, few, k, step, sum);
  // The sums are added within a warp, then within the block, then within the cluster, in an order
  // that depends on the sizes only.
#pragma unroll
  for (int s = 0; s < kShorts; ++s) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) {
#pragma unroll
      for (int step = 16; step >= kAcross; step /= 2)
        sum[s][lane] += __shfl_xor_sync(kAllLanes, sum[s][lane], step);
    }
  }
  const int warps = blockDim.x / kWarp;
  __shared__ C parts[kColumnThreads / kWarp][kShorts][kTile];
  __shared__ C block[kShorts][kTile];
  if (threadIdx.x % kWarp < kAcross) {
#pragma unroll
    for (int s = 0; s < kShorts; ++s) {
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        parts[threadIdx.x / kWarp][s][across * kLanes + lane] = sum[s][lane];
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
      if (s < skinny.shorts && row < skinny.rows)
        finish<T>(skinny, row, s, total + bias_of<T>(skinny, row, s));
    }
  }
#if __CUDA_ARCH__ >= 900
  // No block exits while another one reads its sums.
  if (shares) cg::this_cluster().sync();
#endif
}

// Whether the current device has clusters and its code uses them: the code may have been compiled
// for an older architecture.
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
        cudaFuncGetAttributes(&code, skinny_columns_kernel<float, 1, 1, 32>) == cudaSuccess &&
        major >= 9 && code.ptxVersion >= 90;
    known[device] = has ? 1 : -1;
  }
  return known[device] == 1;
}

template <typename T, int kShorts, int kLanes>
void start_columns_by(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int kAcross = kLanes > 1 ? 4 : 32;
  const int64_t tiles = ceil_div(skinny.rows, kAcross * kLanes);
  // A block has enough threads for each to have just as much of K as it loads at a time, up to
  // kColumnThreads. After that the cluster gets more blocks, as long as there are multiprocessors
  // for them, until a thread has about kSteps elements of K.
  constexpr int64_t kProcessors = 132;
  int threads = 64;
  while (threads < kColumnThreads && threads / kAcross * kColumnsAhead<kLanes> < skinny.inner)
    threads *= 2;
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

}  // namespace

void start_skinny_columns(const Skinny& skinny, int32_t kind, int64_t batch, cudaStream_t stream) {
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (skinny.shorts) {
      case 1:
        return start_columns<T, 1>(skinny, batch, stream);
      case 2:
        return start_columns<T, 2>(skinny, batch, stream);
      default:
        return start_columns<T, 4>(skinny, batch, stream);
    }
  });
}

}  // namespace tch_extension::gemm
