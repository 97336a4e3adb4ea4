// Measures what it costs to exchange h in each step among the blocks that share a recurrent weight
// matrix. These figures decide the layout of a persistent LLTM kernel; they are in
// docs/lab/lltm.md. From the root of the repository:
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -o recurrent_exchange
//     benches/lab/recurrent_exchange.cu && ./recurrent_exchange
//
// Every wait gives up after a while, so that a mistake ends the program instead of hanging it.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kSteps = 2000;
constexpr int kGiveUp = 1 << 22;

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__device__ int gave_up;

// Through L2

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(uint32_t* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

__device__ __forceinline__ void store_release(uint32_t* at, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

enum class Flags { kCounter, kOneEach };

// In each group of `size` blocks, each block writes `words` 16-byte words and reads those of all.
template <Flags kFlags>
__global__ void __launch_bounds__(256)
    through_l2(uint32_t* flags, uint4* data, int size, int words) {
  const int group = blockIdx.x / size, rank = blockIdx.x % size;
  uint32_t* mine = flags + group * 32 * 128;
  uint4* exchanged = data + static_cast<int64_t>(group) * 2 * size * words;
  uint32_t sum = 0;
  for (int step = 1; step <= kSteps; ++step) {
    uint4* to = exchanged + (step % 2) * size * words;
    for (int at = threadIdx.x; at < words; at += blockDim.x) {
      __stcg(to + rank * words + at, make_uint4(sum, step, rank, at));
    }
    __syncthreads();
    if (kFlags == Flags::kCounter) {
      if (threadIdx.x == 0) {
        add_release(mine);
        int tries = 0;
        while (load_acquire(mine) < static_cast<uint32_t>(step) * size && ++tries < kGiveUp) {
        }
        if (tries == kGiveUp) gave_up = 1;
      }
    } else {
      if (threadIdx.x == 0) store_release(mine + rank * 32, step);
      for (int peer = threadIdx.x; peer < size; peer += blockDim.x) {
        int tries = 0;
        while (load_acquire(mine + peer * 32) < static_cast<uint32_t>(step) && ++tries < kGiveUp) {
        }
        if (tries == kGiveUp) gave_up = 1;
      }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < size * words; at += blockDim.x) sum += __ldcg(to + at).y;
  }
  if (sum == 0x12345) gave_up = 2;
}

// Inside a cluster

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ uint32_t at_peer(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

__device__ __forceinline__ void wait_for(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  for (int tries = 0; !done; ++tries) {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (tries == 1 << 16) {
      gave_up = 1;
      return;
    }
  }
}

enum class Push { kStoreAsync, kBulk, kStoreAndBarrier, kStoreAndArrive };

// Each block pushes `words` 16-byte words to all blocks of its cluster, itself included, and then
// waits for theirs.
template <Push kPush>
__global__ void __launch_bounds__(512) inside_cluster(int size, int words) {
  extern __shared__ __align__(128) uint4 shared[];
  __shared__ __align__(8) uint64_t barriers[2];
  // There are two buffers, because a copy may still read one when the next step writes.
  __shared__ uint4 staged[2][256];
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const uint32_t bytes = static_cast<uint32_t>(size * words * 16);
  const bool counts_bytes = kPush == Push::kStoreAsync || kPush == Push::kBulk;
  if (threadIdx.x == 0) {
    const int arrivals = counts_bytes ? 1 : size;
    for (auto& barrier : barriers) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
                   "r"(arrivals));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  cluster_barrier();
  uint32_t sum = 0;
  for (int step = 0; step < kSteps; ++step) {
    uint4* to = shared + (step % 2) * size * words;
    const uint32_t barrier = shared_address(&barriers[step % 2]);
    if (counts_bytes && threadIdx.x == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                   "r"(bytes)
                   : "memory");
    }
    if (kPush == Push::kBulk) {
      if (static_cast<int>(threadIdx.x) < words)
        staged[step % 2][threadIdx.x] = make_uint4(sum, step, rank, 0);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < size) {
        asm volatile(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], "
            "%2, [%3];" ::"r"(at_peer(shared_address(to + rank * words), threadIdx.x)),
            "r"(shared_address(staged[step % 2])), "r"(words * 16),
            "r"(at_peer(barrier, threadIdx.x))
            : "memory");
      }
    } else {
      for (int at = threadIdx.x; at < size * words; at += blockDim.x) {
        const uint32_t peer = at / words;
        const uint32_t address = at_peer(shared_address(to + rank * words + at % words), peer);
        if (kPush == Push::kStoreAsync) {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, "
              "%4}, [%5];" ::"r"(address),
              "r"(sum), "r"(step), "r"(rank), "r"(at), "r"(at_peer(barrier, peer))
              : "memory");
        } else {
          asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(sum),
                       "r"(step), "r"(rank), "r"(at)
                       : "memory");
        }
      }
    }
    if (kPush == Push::kStoreAndBarrier) {
      cluster_barrier();
    } else {
      if (kPush == Push::kStoreAndArrive) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < size) {
          asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                           at_peer(barrier, threadIdx.x))
                       : "memory");
        }
      }
      wait_for(barrier, (step / 2) & 1);
    }
    for (int at = threadIdx.x; at < size * words; at += blockDim.x) sum += to[at].y;
    // All threads must have read before any of them sends again. A product's exchange of partial
    // sums would have the same barrier.
    __syncthreads();
  }
  if (sum == 0x12345) gave_up = 2;
  cluster_barrier();
}

// The product

// Each warp repeatedly multiplies kTiles weight tiles, which stay in its registers, by kColumns · 8
// rows of the batch from shared memory. kRows tiles share each operand that is read of the batch.
template <int kTiles, int kRows, int kColumns>
__global__ void __launch_bounds__(512) product(float* out, long long* cycles, int repeats) {
  extern __shared__ __align__(128) uint4 shared[];
  for (int at = threadIdx.x; at < 2048; at += blockDim.x) shared[at] = make_uint4(at, at, at, at);
  uint32_t weights[kTiles][4];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[tile][i] = (threadIdx.x * 131 + tile * 4 + i) & 0x3fff3fff;
  }
  float sums[kRows][kColumns][4] = {};
  __syncthreads();
  const long long begin = clock64();
  for (int repeat = 0; repeat < repeats; ++repeat) {
#pragma unroll
    for (int k = 0; k < kTiles / kRows; k += 2) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        uint32_t b[4];
        const uint32_t address =
            shared_address(shared) +
            ((threadIdx.x * 16 + k * 512 + column * 8192 + (repeat & 1) * 16384) & 32767);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(address));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int row = 0; row < kRows; ++row) {
            float (&sum)[4] = sums[row][column];
            const uint32_t (&a)[4] = weights[(k + half) * kRows + row];
            asm volatile(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, "
                "%6, %7}, "
                "{%8, "
                "%9}, {%0, %1, %2, %3};"
                : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[2 * half]),
                  "r"(b[2 * half + 1]));
          }
        }
      }
    }
    __syncthreads();
  }
  const long long end = clock64();
  float total = 0;
  for (auto& row : sums) {
    for (auto& column : row) total += column[0] + column[1] + column[2] + column[3];
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
  if (blockIdx.x == 0 && threadIdx.x == 0) *cycles = end - begin;
}

// The host

template <typename Launch>
float microseconds(Launch launch) {
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> all;
  for (int round = 0; round < 5; ++round) {
    cudaEventRecord(begin);
    launch();
    cudaEventRecord(end);
    check(cudaEventSynchronize(end), "run");
    float milliseconds;
    cudaEventElapsedTime(&milliseconds, begin, end);
    all.push_back(milliseconds * 1e3f);
  }
  std::sort(all.begin(), all.end());
  return all[2];
}

void look_whether_one_gave_up() {
  int value = 0;
  check(cudaMemcpyFromSymbol(&value, gave_up, sizeof value), "read");
  if (value != 0) std::printf("  A WAIT GAVE UP\n");
  value = 0;
  check(cudaMemcpyToSymbol(gave_up, &value, sizeof value), "write");
}

template <Flags kFlags>
void measure_l2(const char* name, uint32_t* flags, uint4* data, int groups, int size, int words) {
  void* arguments[] = {&flags, &data, &size, &words};
  const float us = microseconds([&] {
    cudaMemsetAsync(flags, 0, 1 << 20);
    check(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(through_l2<kFlags>),
                                      dim3(groups * size), dim3(256), arguments, 0, nullptr),
          "launch");
  });
  std::printf("l2 %-8s groups %2d of %3d, %5d B each: %.3f us a step\n", name, groups, size,
              words * 16, us / kSteps);
  look_whether_one_gave_up();
}

cudaLaunchConfig_t cluster_config(cudaLaunchAttribute* attribute, int clusters, int size,
                                  int threads, int bytes) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * size);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = size;
  attribute->val.clusterDim.y = attribute->val.clusterDim.z = 1;
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

template <Push kPush>
void measure_cluster(const char* name, int clusters, int size, int words) {
  const int bytes = 2 * size * words * 16;
  cudaLaunchAttribute attribute;
  const auto config = cluster_config(&attribute, clusters, size, 512, bytes);
  check(cudaFuncSetAttribute(inside_cluster<kPush>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             200 << 10),
        "set");
  check(cudaFuncSetAttribute(inside_cluster<kPush>, cudaFuncAttributeNonPortableClusterSizeAllowed,
                             1),
        "set");
  const float us = microseconds(
      [&] { check(cudaLaunchKernelEx(&config, inside_cluster<kPush>, size, words), "launch"); });
  std::printf("cluster %-16s %2d of %2d, %5d B each: %.3f us a step\n", name, clusters, size,
              words * 16, us / kSteps);
  look_whether_one_gave_up();
}

template <int kTiles, int kRows, int kColumns>
void measure_product(int warps) {
  float* out;
  long long* cycles;
  cudaMalloc(&out, 132 * 1024 * sizeof(float));
  cudaMallocManaged(&cycles, sizeof *cycles);
  constexpr int kRepeats = 1000;
  for (int round = 0; round < 2; ++round) {
    product<kTiles, kRows, kColumns><<<132, warps * 32, 32768>>>(out, cycles, kRepeats);
    check(cudaDeviceSynchronize(), "run");
  }
  const double each = static_cast<double>(*cycles) / kRepeats;
  std::printf(
      "mma %2d warps, %2d tiles each, %d rows share, n = %2d: %6.0f cycles a pass, %.2f an mma and "
      "quarter\n",
      warps, kTiles, kRows, 8 * kColumns, each, each / (warps * kTiles * kColumns / 4.0));
  cudaFree(out);
  cudaFree(cycles);
}

}  // namespace

int main() {
  for (const int threads : {256, 512}) {
    for (const int size : {2, 4, 8, 16}) {
      for (const int bytes : {100 << 10, 200 << 10, 227 << 10}) {
        cudaLaunchAttribute attribute;
        const auto config = cluster_config(&attribute, 1, size, threads, bytes - 8448);
        cudaFuncSetAttribute(inside_cluster<Push::kBulk>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, bytes - 8448);
        cudaFuncSetAttribute(inside_cluster<Push::kBulk>,
                             cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        int clusters = -1;
        const auto error =
            cudaOccupancyMaxActiveClusters(&clusters, inside_cluster<Push::kBulk>, &config);
        std::printf("occupancy: %3d clusters of %2d, %d threads, %d KB (%s)\n", clusters, size,
                    threads, bytes >> 10, cudaGetErrorString(error));
      }
    }
  }
  uint32_t* flags;
  uint4* data;
  check(cudaMalloc(&flags, 1 << 20), "allocate");
  check(cudaMalloc(&data, 64 << 20), "allocate");
  for (const int size : {8, 16, 32, 64, 128}) {
    for (const int words : {0, 64}) {
      measure_l2<Flags::kCounter>("counter", flags, data, 1, size, words);
      measure_l2<Flags::kOneEach>("one each", flags, data, 1, size, words);
    }
  }
  for (const int words : {0, 64, 128})
    measure_l2<Flags::kOneEach>("one each", flags, data, 4, 32, words);
  measure_l2<Flags::kCounter>("counter", flags, data, 4, 32, 64);
  for (const int size : {2, 4, 8, 16}) {
    const int clusters = size == 16 ? 4 : 8;
    for (const int words : {16, 64, 128, 256}) {
      measure_cluster<Push::kStoreAsync>("st.async", clusters, size, words);
      measure_cluster<Push::kBulk>("bulk copy", clusters, size, words);
      measure_cluster<Push::kStoreAndBarrier>("store + barrier", clusters, size, words);
      measure_cluster<Push::kStoreAndArrive>("store + arrive", clusters, size, words);
    }
  }
  measure_product<24, 3, 1>(16);
  measure_product<24, 3, 1>(8);
  measure_product<24, 3, 1>(4);
  measure_product<24, 3, 2>(16);
  measure_product<24, 3, 2>(8);
  measure_product<12, 3, 1>(8);
  measure_product<6, 3, 1>(16);
  measure_product<6, 3, 1>(8);
  measure_product<24, 2, 1>(16);
  return 0;
}
