#include "matmul_add_relu.h"
#include "tch_extension/cpu_column_sums.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

// A work item is a piece of an innermost row, so that several threads can share one long row.
constexpr int64_t kColumns = 1024;

int64_t pieces_per_row(const MatmulAddReluForward& params) {
  return (params.size[0] + kColumns - 1) / kColumns;
}

int64_t items(const MatmulAddReluForward& params) {
  int64_t rows = 1;
  for (int dim = 1; dim < params.dims; ++dim) rows *= params.size[dim];
  return rows * pieces_per_row(params);
}

// A thread gets at least this much work, as in libtorch, because waking it costs more.
constexpr int64_t kElements = 32768;

int64_t grain(const MatmulAddReluForward& params) {
  return std::max<int64_t>(1, kElements / std::min(kColumns, std::max<int64_t>(1, params.size[0])));
}

int64_t flat_pieces(const MatmulAddReluBackward& params) {
  return (params.sums.rows * params.sums.columns + kColumns - 1) / kColumns;
}

int64_t items(const MatmulAddReluBackward& params) {
  return params.sums.sums == nullptr ? flat_pieces(params) : column_sums_items(params.sums);
}

int64_t grain(const MatmulAddReluBackward& params) {
  return params.sums.sums == nullptr ? kElements / kColumns : column_sums_grain(params.sums);
}

int64_t finish_items(const MatmulAddReluBackward& params) {
  return finish_column_sums_items(params.sums);
}

int64_t finish_grain(const MatmulAddReluBackward& params) {
  return finish_column_sums_grain(params.sums);
}

// Where a row begins.
struct Row {
  int64_t product;
  int64_t bias;
};

Row row_at(const MatmulAddReluForward& params, int64_t index) {
  Row row{0, 0};
  for (int dim = 1; dim < params.dims; ++dim) {
    const int64_t place = index % params.size[dim];
    index /= params.size[dim];
    row.product += place * params.product_stride[dim];
    row.bias += place * params.bias_stride[dim];
  }
  return row;
}

template <typename T>
Vec<Compute<T>> load_strided(const T* from, int64_t stride, int64_t count) {
  if (stride == 1) return load(from, count);
  if (stride == 0) return Vec<Compute<T>>(static_cast<Compute<T>>(*from));
  T gathered[kVecSize<T>];
  for (int64_t i = 0; i < count; ++i) gathered[i] = from[i * stride];
  return load(gathered, count);
}

template <typename T>
void forward(const MatmulAddReluForward& params, int64_t begin, int64_t end) {
  using V = Vec<Compute<T>>;
  const V zero(0);
  const int64_t pieces = pieces_per_row(params);
  const int64_t product_stride = params.product_stride[0];
  const int64_t bias_stride = params.bias_stride[0];
  for (int64_t item = begin; item < end; ++item) {
    const int64_t index = item / pieces;
    const int64_t first = (item % pieces) * kColumns;
    const int64_t last = std::min(params.size[0], first + kColumns);
    const Row row = row_at(params, index);
    const T* product = static_cast<const T*>(params.product) + row.product;
    const T* bias = static_cast<const T*>(params.bias) + row.bias;
    T* out = static_cast<T*>(params.out) + index * params.size[0];
    for (int64_t column = first; column < last; column += kVecSize<T>) {
      const int64_t count = std::min(kVecSize<T>, last - column);
      const V z = load_strided(product + column * product_stride, product_stride, count) +
                  load_strided(bias + column * bias_stride, bias_stride, count);
      // max would not keep NaN.
      store(V::blendv(z, zero, z < zero), out + column, count);
    }
  }
}

template <typename T>
Vec<Compute<T>> masked(const MatmulAddReluBackward& params, int64_t at, int64_t count) {
  using V = Vec<Compute<T>>;
  const V zero(0);
  const V grad = load(static_cast<const T*>(params.grad) + at, count);
  const V out = load(static_cast<const T*>(params.out) + at, count);
  // The gradient is selected, not multiplied by 0, because NaN or infinity times 0 is NaN.
  const V grad_product = V::blendv(grad, zero, out <= zero);
  store(grad_product, static_cast<T*>(params.grad_product) + at, count);
  return grad_product;
}

template <typename T>
void backward(const MatmulAddReluBackward& params, int64_t begin, int64_t end) {
  if (params.sums.sums != nullptr) {
    return column_sums<T>(params.sums, begin, end, [&](int64_t row, int64_t column, int64_t count) {
      return masked<T>(params, row * params.sums.columns + column, count);
    });
  }
  const int64_t last = std::min(params.sums.rows * params.sums.columns, end * kColumns);
  for (int64_t at = begin * kColumns; at < last; at += kVecSize<T>) {
    masked<T>(params, at, std::min(kVecSize<T>, last - at));
  }
}

}  // namespace

static void matmul_add_relu_forward(const MatmulAddReluForward& params, int64_t begin,
                                    int64_t end) {
  for_kind(params.kind,
           [&](auto type) { forward<typename decltype(type)::type>(params, begin, end); });
}

static void matmul_add_relu_backward(const MatmulAddReluBackward& params, int64_t begin,
                                     int64_t end) {
  for_kind(params.kind,
           [&](auto type) { backward<typename decltype(type)::type>(params, begin, end); });
}

static void matmul_add_relu_backward_finish(const MatmulAddReluBackward& params, int64_t begin,
                                            int64_t end) {
  for_kind(params.kind, [&](auto type) {
    finish_column_sums<typename decltype(type)::type>(params.sums, begin, end);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_matmul_add_relu_forward, matmul_add_relu_forward,
                         MatmulAddReluForward, items, grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_matmul_add_relu_backward, matmul_add_relu_backward,
                         MatmulAddReluBackward, items, grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_matmul_add_relu_backward_finish,
                         matmul_add_relu_backward_finish, MatmulAddReluBackward, finish_items,
                         finish_grain)
