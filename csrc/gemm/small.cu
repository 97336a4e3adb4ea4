#include "small.h"

namespace tch_extension::gemm {
namespace {

// Of the output, that a block computes, one element a thread; and how much of K is in shared memory at a
// time.
constexpr int kTile = 16;
constexpr int kInner = 32;
static_assert(kTile * kTile == kThreads);

template <typename T>
__device__ __forceinline__ Compute<T> value_at(const Matrices& operand, int64_t batch, int64_t row,
                                               int64_t column) {
  const auto* data = static_cast<const T*>(operand.data);
  return static_cast<Compute<T>>(data[batch * operand.batch + row * operand.row + column * operand.column]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) small_product_kernel(Product product) {
  using C = Compute<T>;
  // Padded, so that threads that fill a column, or read rows, use different banks.
  __shared__ alignas(16) C lhs[kTile][kInner + 4];
  __shared__ C rhs[kInner][kTile + 1];
  const int64_t batch = blockIdx.z;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int thread = threadIdx.x;
  const int64_t row = first_row + thread / kTile;
  const int64_t column = first_column + thread % kTile;
  const bool inside = row < product.m && column < product.n;
  // Asked for first, needed last.
  const C bias =
      inside && product.bias.data != nullptr ? value_at<T>(product.bias, batch, row, column) : C(0);
  // Neighbouring threads read neighbouring addresses, whichever dimension is contiguous.
  const bool lhs_by_columns = product.lhs.column != 1;
  const bool rhs_by_columns = product.rhs.column != 1;
  C sum = 0;
  for (int64_t from = 0; from < product.k; from += kInner) {
    if (from > 0) __syncthreads();
#pragma unroll
    for (int index = thread; index < kTile * kInner; index += kThreads) {
      const int of_row = lhs_by_columns ? index % kTile : index / kInner;
      const int inner = lhs_by_columns ? index / kTile : index % kInner;
      lhs[of_row][inner] = first_row + of_row < product.m && from + inner < product.k
                               ? value_at<T>(product.lhs, batch, first_row + of_row, from + inner)
                               : C(0);
    }
#pragma unroll
    for (int index = thread; index < kTile * kInner; index += kThreads) {
      const int of_column = rhs_by_columns ? index / kInner : index % kTile;
      const int inner = rhs_by_columns ? index % kInner : index / kTile;
      rhs[inner][of_column] = first_column + of_column < product.n && from + inner < product.k
                                  ? value_at<T>(product.rhs, batch, from + inner, first_column + of_column)
                                  : C(0);
    }
    __syncthreads();
    // A multiple of the vectors that the compiler reads lhs by, and zeros behind the end.
#pragma unroll
    for (int inner = 0; inner < kInner; ++inner)
      sum += lhs[thread / kTile][inner] * rhs[inner][thread % kTile];
  }
  if (!inside) return;
  sum += bias;
  // Not max: NaN stays.
  if (product.relu && sum < 0) sum = 0;
  static_cast<T*>(product.out)[(batch * product.m + row) * product.n + column] = static_cast<T>(sum);
}

int64_t tiles(int64_t size) { return (size + kTile - 1) / kTile; }

}  // namespace

bool small_product_can(const Product& product) {
  constexpr int64_t kMostBlocks = 65535;  // along the grid's second and third dimension
  return product.batch <= kMostBlocks && tiles(product.m) <= kMostBlocks && tiles(product.n) <= INT32_MAX;
}

bool small_product_is_faster(const Product& product) {
  const int64_t blocks = product.batch * tiles(product.m) * tiles(product.n);
  const bool is_half = product.kind == kTchExtensionHalf || product.kind == kTchExtensionBFloat16;
  // Tensor cores are used for the half kinds as soon as there is something to do for them.
  if (is_half) return product.k <= 32 && blocks <= 256;
  if (product.k <= 32) return blocks <= 512;
  if (product.k <= 64) return blocks <= 144;
  return product.k <= 128 && blocks <= 32;
}

LaunchStatus small_product(const Product& product, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned int>(tiles(product.n)), static_cast<unsigned int>(tiles(product.m)),
                    static_cast<unsigned int>(product.batch));
  for_kind(product.kind, [&](auto type) {
    small_product_kernel<typename decltype(type)::type><<<blocks, kThreads, 0, stream>>>(product);
  });
  return launch_status("small_product");
}

}  // namespace tch_extension::gemm
