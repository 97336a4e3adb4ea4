// Products so small that blocks without tensor cores, each for a 16×16 tile of the output, finish
// before cuBLASLt's kernels have filled their pipelines. Operands may have any strides.
#include "product.h"
#include "tch_extension/launch.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::gemm {
namespace {

// A block computes kTile × kTile elements of the output, one per thread, and has kInner elements of
// K in shared memory at a time.
constexpr int kTile = 16;
constexpr int kInner = 32;
static_assert(kTile * kTile == kThreads);

// One matrix of an operand's batch.
template <typename T>
struct Matrix {
  const T* data;
  int64_t row;
  int64_t column;

  __device__ __forceinline__ Matrix(const Matrices& operand, int64_t batch)
      : data(static_cast<const T*>(operand.data) + batch * operand.batch),
        row(operand.row),
        column(operand.column) {}

  __device__ __forceinline__ Compute<T> at(int of_row, int of_column) const {
    return static_cast<Compute<T>>(data[of_row * row + of_column * column]);
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) small_product_kernel(Product product) {
  using C = Compute<T>;
  // Elements of a row of lhs per 16-byte read from shared memory.
  constexpr int kLanes = kLanesOf16Bytes<C>;
  // The padding avoids bank conflicts between threads that fill a column.
  __shared__ alignas(16) C lhs[kTile][kInner + kLanes];
  __shared__ C rhs[kInner][kTile + 1];
  const Matrix<T> left(product.lhs, blockIdx.z);
  const Matrix<T> right(product.rhs, blockIdx.z);
  const Matrix<T> added(product.bias, blockIdx.z);
  const int m = static_cast<int>(product.m);
  const int n = static_cast<int>(product.n);
  const int k = static_cast<int>(product.k);
  const int first_row = blockIdx.y * kTile;
  const int first_column = blockIdx.x * kTile;
  const int thread = threadIdx.x;
  const int my_row = thread / kTile;
  const int my_column = thread % kTile;
  const bool inside = first_row + my_row < m && first_column + my_column < n;
  // The bias is loaded first although it is needed last, to hide the latency of the load.
  const C bias = inside && product.bias.data != nullptr
                     ? added.at(first_row + my_row, first_column + my_column)
                     : C(0);
  // Adjacent threads read adjacent addresses, whichever dimension is contiguous.
  const bool left_by_columns = left.column != 1;
  const bool right_by_columns = right.column != 1;
  C sum = 0;
  for (int from = 0; from < k; from += kInner) {
#pragma unroll
    for (int step = 0; step < kTile * kInner / kThreads; ++step) {
      const int index = thread + step * kThreads;
      const int row = left_by_columns ? index % kTile : index / kInner;
      const int inner = left_by_columns ? index / kTile : index % kInner;
      const bool exists = first_row + row < m && from + inner < k;
      lhs[row][inner] = exists ? left.at(first_row + row, from + inner) : C(0);
    }
#pragma unroll
    for (int step = 0; step < kTile * kInner / kThreads; ++step) {
      const int index = thread + step * kThreads;
      const int column = right_by_columns ? index / kInner : index % kTile;
      const int inner = right_by_columns ? index % kInner : index / kTile;
      const bool exists = first_column + column < n && from + inner < k;
      rhs[inner][column] = exists ? right.at(from + inner, first_column + column) : C(0);
    }
    __syncthreads();
#pragma unroll
    for (int inner = 0; inner < kInner; inner += kLanes) {
      const auto row = *reinterpret_cast<const Vector<C, kLanes>*>(&lhs[my_row][inner]);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        sum += row.lane[lane] * rhs[inner + lane][my_column];
    }
    if (from + kInner < k) __syncthreads();
  }
  sum += bias;
  // Not max(), which would turn NaN into 0.
  if (product.relu && sum < 0) sum = 0;
  if (!inside) return;
  const int64_t row = static_cast<int64_t>(blockIdx.z) * m + first_row + my_row;
  static_cast<T*>(product.out)[row * n + first_column + my_column] = static_cast<T>(sum);
}

int64_t tiles(int64_t size) { return ceil_div(size, kTile); }

}  // namespace
}  // namespace tch_extension::gemm

using namespace tch_extension;
using namespace tch_extension::gemm;

extern "C" bool tch_extension_gemm_small_can_cuda(const GemmProduct* product) {
  constexpr int64_t kMostBlocks = 65535;  // along the grid's second and third dimension
  // Leaves room to add a tile's width in 32 bits.
  constexpr int64_t kMost = INT32_MAX - kInner;
  return product->batch <= kMostBlocks && tiles(product->m) <= kMostBlocks && product->n <= kMost &&
         product->k <= kMost;
}

extern "C" LaunchStatus tch_extension_gemm_small_cuda(const GemmProduct* product,
                                                      cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned int>(tiles(product->n)),
                    static_cast<unsigned int>(tiles(product->m)),
                    static_cast<unsigned int>(product->batch));
  for_kind(product->kind, [&](auto type) {
    small_product_kernel<typename decltype(type)::type><<<blocks, kThreads, 0, stream>>>(*product);
  });
  return launch_status("small_product");
}
