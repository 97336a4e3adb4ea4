// Products of small matrices on the CPU, for which a call of libtorch's product and its threads
// would cost more than the computation.
//
// Nothing is packed: single values of the left matrix, which may have any strides, are multiplied
// by whole vectors of the right matrix, whose rows are contiguous. Each result is one sum in the
// order of the inner index, whatever the number of threads.
//
// Needs: torch's headers.
#pragma once

#include "tch_extension/cpu_registers.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// The number of sums that stay in registers. It is enough to hide the latency of an addition, and
// takes at most half of all registers.
template <typename T>
constexpr int kAccumulators = sizeof(Vec<T>) == 64 ? 16 : 8;

// A matrix with any strides, which is read value by value. `row` and `inner` are the strides.
template <typename T>
struct Scattered {
  const T* data;
  int64_t row;
  int64_t inner;
};

// A matrix with contiguous rows.
template <typename T>
struct Rows {
  const T* data;
  int64_t inner;  // stride from one row to the next
};

// Multiplies kRows rows of `left` by kVectors vectors of `right`, and writes the result to `to`.
// Unless kWhole, the last vector ends after `columns` columns in all.
template <int kRows, int kVectors, bool kWhole, typename T>
inline void product_tile(Scattered<T> left, Rows<T> right, int64_t inner, int64_t columns, T* to,
                         int64_t to_row) {
  using V = Vec<T>;
  constexpr int64_t kSize = V::size();
  const int64_t last = kWhole ? kSize : columns - (kVectors - 1) * kSize;
  auto sums = registers<V, kRows * kVectors>([](auto) TCH_EXTENSION_INLINE { return V(T(0)); });
  for (int64_t k = 0; k < inner; ++k) {
    auto values = registers<V, kVectors>([&](auto at) TCH_EXTENSION_INLINE {
      const T* from = right.data + at * kSize;
      return kWhole || at + 1 < kVectors ? V::loadu(from) : V::loadu(from, last);
    });
    unrolled<kRows>([&](auto row) TCH_EXTENSION_INLINE {
      const V factor(left.data[row * left.row]);
      unrolled<kVectors>([&](auto at) TCH_EXTENSION_INLINE {
        V& sum = sums[row * kVectors + at];
        sum = at::vec::fmadd(factor, values[at], sum);
      });
    });
    left.data += left.inner;
    right.data += right.inner;
  }
  unrolled<kRows * kVectors>([&](auto at) TCH_EXTENSION_INLINE {
    constexpr int kVector = at % kVectors;
    T* row = to + (at / kVectors) * to_row + kVector * kSize;
    const V sum = sums[at];
    kWhole || kVector + 1 < kVectors ? sum.store(row) : sum.store(row, last);
  });
}

template <int kVectors, bool kWhole, typename T>
void product_columns(Scattered<T> left, Rows<T> right, int64_t rows, int64_t inner, int64_t columns,
                     T* to, int64_t to_row) {
  constexpr int kRows = kAccumulators<T> / kVectors;
  int64_t row = 0;
  const auto step = [&](auto count) {
    for (; row + count <= rows; row += count) {
      const Scattered<T> from{left.data + row * left.row, left.row, left.inner};
      product_tile<count, kVectors, kWhole>(from, right, inner, columns, to + row * to_row, to_row);
    }
  };
  step(std::integral_constant<int, kRows>{});
  step(std::integral_constant<int, kRows / 2>{});
  step(std::integral_constant<int, 1>{});
}

// to[r][c] = Σ_k left[r][k] right[k][c]
template <typename T>
void small_product(Scattered<T> left, Rows<T> right, int64_t rows, int64_t inner, int64_t columns,
                   T* to, int64_t to_row) {
  constexpr int64_t kSize = Vec<T>::size();
  for (int64_t column = 0; column < columns;) {
    const int64_t left_over = columns - column;
    const Rows<T> from{right.data + column, right.inner};
    const auto run = [&](auto vectors, auto whole) {
      product_columns<vectors, whole>(left, from, rows, inner, left_over, to + column, to_row);
      column += vectors * kSize;
    };
    using std::bool_constant;
    using std::integral_constant;
    if (left_over >= 2 * kSize) {
      run(integral_constant<int, 2>{}, bool_constant<true>{});
    } else if (left_over > kSize) {
      run(integral_constant<int, 2>{}, bool_constant<false>{});
    } else if (left_over == kSize) {
      run(integral_constant<int, 1>{}, bool_constant<true>{});
    } else {
      run(integral_constant<int, 1>{}, bool_constant<false>{});
    }
  }
}

// Part of a transposition: each round interleaves the lines of the upper half with those of the
// lower half.
template <int kRounds, typename V, int kSize>
inline TCH_EXTENSION_INLINE auto interleaved(Registers<V, kSize> lines) {
  if constexpr (kRounds == 1) {
    return lines;
  } else {
    return interleaved<kRounds / 2>(registers<V, kSize>([&](auto at) TCH_EXTENSION_INLINE {
      const auto both = at::vec::interleave2(lines[at / 2], lines[at / 2 + kSize / 2]);
      return at % 2 == 0 ? both.first : both.second;
    }));
  }
}

// to[c][r] = from[r][c] for a block of `rows` × `columns`, neither of which is more than the size
// of a vector. It writes a whole square of that size to `to`, with zeros in the rest.
template <typename T>
inline void transpose_block(const T* from, int64_t from_row, int64_t rows, int64_t columns, T* to,
                            int64_t to_row) {
  using V = Vec<T>;
  constexpr int kSize = V::size();
  const auto lines = registers<V, kSize>([&](auto row) TCH_EXTENSION_INLINE {
    // Do not read beyond the last column, where the memory may end.
    return row >= rows        ? V(T(0))
           : columns == kSize ? V::loadu(from + row * from_row)
                              : V::loadu(from + row * from_row, columns);
  });
  auto turned = interleaved<kSize>(lines);
  unrolled<kSize>([&](auto row) TCH_EXTENSION_INLINE {
    const V line = turned[row];
    line.store(to + row * to_row);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
