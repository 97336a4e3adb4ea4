#include "maths.h"
#include "tch_extension/cuda_vector.h"

namespace tch_extension {
namespace {

template <typename T, typename Index>
__global__ void maths_kernel(Accessor<const T, 2, Index> x, Accessor<T, 2, Index> y,
                             int32_t function) {
  const Index row = blockIdx.x;
  for (Index column = threadIdx.x; column < x.sizes[1]; column += blockDim.x) {
    y(row, column) =
        static_cast<T>(evaluate<Compute<T>>(function, static_cast<Compute<T>>(x[row][column])));
  }
}

template <typename T, int kLanes>
__global__ void twice_kernel(const void* x, void* y, int64_t len) {
  const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kLanes;
  if (at >= len) return;
  const bool whole = at + kLanes <= len;
  auto values = whole ? load_values<T, kLanes>(x, at) : load_tail<T, kLanes>(x, at, len - at);
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values.lane[lane] *= 2;
  whole ? store_values<T, kLanes>(y, at, values) : store_tail<T, kLanes>(y, at, len - at, values);
}

template <typename T, int kLanes>
void twice(const void* x, void* y, int64_t len, cudaStream_t stream) {
  const unsigned int blocks = blocks_for((len + kLanes - 1) / kLanes);
  twice_kernel<T, kLanes><<<blocks, kThreads, 0, stream>>>(x, y, len);
}

}  // namespace
}  // namespace tch_extension

extern "C" tch_extension::LaunchStatus downstream_maths_cuda(const MathsParams* params,
                                                             cudaStream_t stream) {
  using namespace tch_extension;
  for_kind(params->x.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    const auto x = params->x.of<T>();
    const auto y = params->y.of<T>();
    const auto rows = static_cast<unsigned int>(x.sizes[0]);
    if (x.fits_in_32_bits() && y.fits_in_32_bits()) {
      maths_kernel<T, int32_t><<<rows, kThreads, 0, stream>>>(
          x.template as<const T, int32_t>(), y.template as<T, int32_t>(), params->function);
    } else {
      maths_kernel<T, int64_t><<<rows, kThreads, 0, stream>>>(x, y, params->function);
    }
  });
  return launch_status("maths");
}

// Doubles a contiguous array, with vectors if both addresses are aligned.
extern "C" tch_extension::LaunchStatus downstream_twice_cuda(const void* x, void* y, int64_t len,
                                                             int32_t kind, cudaStream_t stream) {
  using namespace tch_extension;
  for_kind(kind, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int kLanes = kLanesOf16Bytes<T>;
    const bool aligned = is_aligned<T, kLanes>(x) && is_aligned<T, kLanes>(y);
    aligned ? twice<T, kLanes>(x, y, len, stream) : twice<T, 1>(x, y, len, stream);
  });
  return launch_status("twice");
}
