// The CUDA kernels. A block computes a square of the result. It copies squares of both factors into
// shared memory, where a whole row or column of threads uses each value.

#include <algorithm>

#include "kernels.h"
#include "tch_extension/launch.h"

namespace {

using tch_extension::Accessor;

constexpr int kTile = 16;

template <typename T, typename Start>
__global__ void __launch_bounds__(kTile* kTile)
    product(Accessor<const T, 2> a, Accessor<const T, 2> b, Accessor<T, 2> c, Start start) {
  __shared__ T tile_a[kTile][kTile];
  __shared__ T
      tile_b[kTile][kTile + 1];  // padded by one, so that a column's values are in different banks
  const int64_t inner = a.sizes[1];
  const int64_t column = int64_t(blockIdx.x) * kTile + threadIdx.x;
  // Blocks step over the rows by the height of the grid: there may be more tiles than a grid can
  // have in this direction.
  for (int64_t first = int64_t(blockIdx.y) * kTile; first < c.sizes[0];
       first += int64_t(gridDim.y) * kTile) {
    const int64_t row = first + threadIdx.y;
    T sum = column < c.sizes[1] ? start.template at<T>(column) : T(0);
    for (int64_t k = 0; k < inner; k += kTile) {
      const int64_t k_a = k + threadIdx.x, k_b = k + threadIdx.y;
      tile_a[threadIdx.y][threadIdx.x] = row < c.sizes[0] && k_a < inner ? a(row, k_a) : T(0);
      tile_b[threadIdx.y][threadIdx.x] = column < c.sizes[1] && k_b < inner ? b(k_b, column) : T(0);
      __syncthreads();
      for (int i = 0; i < kTile; ++i) sum += tile_a[threadIdx.y][i] * tile_b[i][threadIdx.x];
      // All threads must have read the squares before the next ones overwrite them.
      __syncthreads();
    }
    if (row < c.sizes[0] && column < c.sizes[1]) c(row, column) = sum;
  }
}

template <typename T, typename Start>
void launch(Accessor<const T, 2> a, Accessor<const T, 2> b, Accessor<T, 2> c, Start start,
            cudaStream_t stream) {
  constexpr int64_t kMostRows = 65535;
  const int64_t tiles_down = (c.sizes[0] + kTile - 1) / kTile,
                tiles_across = (c.sizes[1] + kTile - 1) / kTile;
  if (tiles_down == 0 || tiles_across == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles_across),
                  static_cast<unsigned>(std::min(tiles_down, kMostRows)));
  product<T><<<grid, dim3(kTile, kTile), 0, stream>>>(a, b, c, start);
}

template <typename Body>
void for_float_or_double(int32_t kind, Body body) {
  if (kind == kTchExtensionFloat) body(float());
  if (kind == kTchExtensionDouble) body(double());
}

}  // namespace

extern "C" tch_extension::LaunchStatus extension_linear_forward_cuda(const LinearForward* params,
                                                                     cudaStream_t stream) {
  for_float_or_double(params->y.kind, [&](auto zero) {
    using T = decltype(zero);
    const extension::StartWithBias<T> start{params->b.of<T>()};
    launch<T>(params->x.of<T>(), params->wt.of<T>(), params->y.of<T>(), start, stream);
  });
  return tch_extension::launch_status("linear_forward");
}

extern "C" tch_extension::LaunchStatus extension_linear_product_cuda(const LinearProduct* params,
                                                                     cudaStream_t stream) {
  for_float_or_double(params->c.kind, [&](auto zero) {
    using T = decltype(zero);
    launch<T>(params->a.of<T>(), params->b.of<T>(), params->c.of<T>(), extension::StartWithZero(),
              stream);
  });
  return tch_extension::launch_status("linear_product");
}
