// The CPU kernels. libtorch's threads share the rows, and the innermost loop runs along a row of
// the result.

#include "kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>

namespace {

using tch_extension::Accessor;

constexpr int64_t kTile = 64;

// A square of the second factor, copied row by row from any strides. It is read once and used by
// every row of the result.
template <typename T>
struct Tile {
  T values[kTile][kTile];

  Tile(Accessor<const T, 2> b, int64_t first_row, int64_t rows, int64_t first_column,
       int64_t columns) {
    for (int64_t k = 0; k < rows; ++k) {
      for (int64_t j = 0; j < kTile; ++j) {
        values[k][j] = j < columns ? b(first_row + k, first_column + j) : T(0);
      }
    }
  }
};

template <typename T>
void add_product(Accessor<const T, 2> a, Accessor<const T, 2> b, Accessor<T, 2> c, int64_t begin,
                 int64_t end, int64_t first_column) {
  const int64_t columns = std::min(kTile, c.sizes[1] - first_column), inner = a.sizes[1];
  for (int64_t k0 = 0; k0 < inner; k0 += kTile) {
    const int64_t count = std::min(kTile, inner - k0);
    const Tile<T> tile(b, k0, count, first_column, columns);
    for (int64_t row = begin; row < end; ++row) {
      T sums[kTile] = {};
      for (int64_t k = 0; k < count; ++k) {
        const T factor = a(row, k0 + k);
        for (int64_t j = 0; j < kTile; ++j) sums[j] += factor * tile.values[k][j];
      }
      for (int64_t j = 0; j < columns; ++j) c(row, first_column + j) += sums[j];
    }
  }
}

template <typename T, typename Start>
void product(Accessor<const T, 2> a, Accessor<const T, 2> b, Accessor<T, 2> c, Start start) {
  const int64_t columns = c.sizes[1];
  // Each thread gets at least this many multiplications, because waking a thread costs
  // microseconds.
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns * a.sizes[1]));
  at::parallel_for(0, c.sizes[0], grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t column = 0; column < columns; ++column)
        c(row, column) = start.template at<T>(column);
    }
    for (int64_t column = 0; column < columns; column += kTile)
      add_product<T>(a, b, c, begin, end, column);
  });
}

// Calls `body` with a value of the kind that the kernels support. The Rust side rejects all other
// kinds.
template <typename Body>
void for_float_or_double(int32_t kind, Body body) {
  if (kind == kTchExtensionFloat) body(float());
  if (kind == kTchExtensionDouble) body(double());
}

}  // namespace

extern "C" void extension_linear_forward_cpu(const LinearForward* params) noexcept {
  for_float_or_double(params->y.kind, [&](auto zero) {
    using T = decltype(zero);
    const extension::StartWithBias<T> start{params->b.of<T>()};
    product<T>(params->x.of<T>(), params->wt.of<T>(), params->y.of<T>(), start);
  });
}

extern "C" void extension_linear_product_cpu(const LinearProduct* params) noexcept {
  for_float_or_double(params->c.kind, [&](auto zero) {
    using T = decltype(zero);
    product<T>(params->a.of<T>(), params->b.of<T>(), params->c.of<T>(), extension::StartWithZero());
  });
}
