// Launches of a grid: whether all its blocks can run at the same time, and the launch itself.
#pragma once

#include "../launch.h"
#include "product.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent::grid {
namespace {

struct Launch {
  Launch(int64_t blocks, int threads, int bytes, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned int>(blocks));
    config.blockDim = dim3(static_cast<unsigned int>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(bytes);
    config.stream = stream;
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
};

// The number of blocks: those for the columns of h, times the groups of rows. Scaled messages come
// from pairs of tiles.
template <typename Params>
int64_t blocks_of(const Params& params) {
  const int64_t at_least = params.scales == nullptr ? 1 : 2 * kTile;
  const int64_t hidden = round_up(params.hidden, at_least);
  return ceil_div(hidden, params.columns) * params.row_groups;
}

// The most sub-batches that a block works through.
template <typename Params>
int subs_of(const Params& params) {
  const int64_t rows = kRows * static_cast<int64_t>(params.row_groups);
  return static_cast<int>(ceil_div(params.batch, rows));
}

// The result of a launch: whether all its blocks can run at the same time (this process may be
// limited to too few multiprocessors), and an error or null.
struct Status {
  bool fits;
  const char* error;
};

// How many blocks of this size fit a multiprocessor of the device. It is 0 for a kernel that was
// compiled for any other architecture than Hopper's own: such a kernel is empty and would leave the
// messages unsent. The runtime does not say which code it would use, but an empty kernel uses next
// to no registers. The answer never changes, and the query costs a launch almost a microsecond, so
// the last answer is cached with its number of bytes.
template <auto kKernel, int kThreadsOfBlock>
cudaError_t ask_blocks_of_processor(int device, int bytes, int* blocks) {
  constexpr int kRegistersOfNothing = 32;
  constexpr int64_t kMostBlocks = 64;
  static std::atomic<int64_t> known[kDevices];
  const int64_t of_bytes = (int64_t{bytes} + 1) * kMostBlocks;
  const int64_t last = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (last / kMostBlocks * kMostBlocks == of_bytes) {
    *blocks = static_cast<int>(last % kMostBlocks);
    return cudaSuccess;
  }
  cudaFuncAttributes code = {};
  cudaError_t error = cudaFuncGetAttributes(&code, kKernel);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kKernel, kThreadsOfBlock,
                                                          static_cast<size_t>(bytes));
  }
  if (error != cudaSuccess) return error;
  if (code.numRegs <= kRegistersOfNothing) *blocks = 0;
  if (device < kDevices) known[device].store(of_bytes + *blocks, std::memory_order_relaxed);
  return cudaSuccess;
}

// Whether all blocks can run at once. This is queried before the launch, because a launch that
// fails invalidates the graph that a stream is captured in. The number of multiprocessors is
// queried each time, because this process may be limited to a part of them.
template <auto kKernel, int kThreadsOfBlock>
cudaError_t ask_whether_fits(int64_t blocks, int bytes, bool* fits) {
  int device = 0, processors = 0, of_one = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) {
    error = ask_blocks_of_processor<kKernel, kThreadsOfBlock>(device, bytes, &of_one);
  }
  *fits = error == cudaSuccess && blocks <= static_cast<int64_t>(of_one) * processors;
  return error;
}

// Marks the messages as unsent and launches the kernel.
template <auto kKernel, int kThreadsOfBlock, typename Params>
Status start(const Params& params, int bytes, void* messages, size_t size, cudaStream_t stream) {
  constexpr int kAllBits = 0xff;
  bool fits = false;
  cudaError_t error = allow<kKernel>();
  if (error == cudaSuccess) {
    error = ask_whether_fits<kKernel, kThreadsOfBlock>(blocks_of(params), bytes, &fits);
  }
  if (error == cudaSuccess && !fits) return {false, nullptr};
  if (error == cudaSuccess) error = cudaMemsetAsync(messages, kAllBits, size, stream);
  if (error == cudaSuccess) {
    const Launch launch(blocks_of(params), kThreadsOfBlock, bytes, stream);
    error = cudaLaunchKernelEx(&launch.config, kKernel, params);
  }
  // Also clears this launch's error before the next launch check.
  const LaunchStatus status = launch_status("");
  if (error == cudaErrorCooperativeLaunchTooLarge) return {false, nullptr};
  return {true, error == cudaSuccess ? status.error : cudaGetErrorString(error)};
}

// Calls Start::start for these kinds and sums of this many terms. `fits` becomes false if not all
// blocks can run at once; no kernel is then started.
template <typename Start, typename Params, bool kIsPlain = false>
struct Call {
  template <typename S, typename T>
  const char* run() const {
    if constexpr ((sizeof(T) == 2) == kIsPlain) {
      return kNoKernel;
    } else {
      constexpr int64_t kOfVectors = kWarps * kSpan<T>;
      const int64_t vectors = ceil_div(terms, kOfVectors);
      const Status status = Start::template start<S, T>(params, vectors, stream);
      *fits = status.fits;
      return status.error;
    }
  }

  const Params& params;
  int64_t terms;
  bool* fits;
  cudaStream_t stream;
};

}  // namespace
}  // namespace tch_extension::recurrent::grid
