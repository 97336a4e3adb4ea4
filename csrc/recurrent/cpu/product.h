// The product of some rows of a step with packed weights.
//
// A panel is as many columns of h as some vectors hold. The weights that produce them are adjacent
// in memory, in the order in which the product reads them, with zeros after the last column.
#pragma once

#include "tch_extension/cpu.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::recurrent::cpu {
inline namespace CPU_CAPABILITY {
namespace {

// How many rows a block has whose sums are kVectors vectors each: as many as the registers have
// room for, next to kVectors vectors of weights. AVX-512 has 32 registers, of which 24 are sums for
// 3 vectors a row.
template <int kVectors>
#if defined(CPU_CAPABILITY_AVX512)
constexpr int kMostRows = kVectors <= 3 ? 8 : 4;
#else
constexpr int kMostRows = kVectors <= 3 ? 4 : 2;
#endif

// How many vectors of columns of h the backward pass computes at a time.
constexpr int kGradVectors = 2;

template <int kCount>
struct Rows {
  static constexpr int count = kCount;
};

// Calls body(Rows<n>{}, row) for blocks of rows: of kCount rows while there are as many, then of
// half as many, and so on.
template <int kCount, typename Body>
void for_each_block(int64_t begin, int64_t end, Body body) {
  for (; begin + kCount <= end; begin += kCount) body(Rows<kCount>{}, begin);
  if constexpr (kCount > 1) for_each_block<kCount / 2>(begin, end, body);
}

// The sums of a block of rows, between the product and the rest of a step. The memory is not set to
// zeros, which an array of vectors would be.
template <typename T, int kCount, int kVectors>
struct Tile {
  alignas(64) T values[kCount][kVectors][Vec<T>::size()];
};

// Calls end(row, v, sum) with sum = start(row, v) + values[row] · panel, where the panel has
// kVectors vectors for each of the row's values. All sums stay in registers. Each is added up in
// the same order whatever the size of the block is, so that the bits of a row do not depend on who
// computes it.
template <typename T, int kCount, int kVectors, typename Start, typename End>
inline __attribute__((always_inline)) void multiply(const T* values, int64_t stride, int64_t depth,
                                                    const T* panel, const Start& start,
                                                    const End& end) {
  Vec<T> sums[kCount][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = start(row, v);
  }
  for (int64_t k = 0; k < depth; ++k, panel += kVectors * Vec<T>::size()) {
    Vec<T> weights[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) weights[v] = Vec<T>::loadu(panel + v * Vec<T>::size());
#pragma GCC unroll 8
    for (int row = 0; row < kCount; ++row) {
      const Vec<T> value(values[row * stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v)
        sums[row][v] = at::vec::fmadd(value, weights[v], sums[row][v]);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) end(row, v, sums[row][v]);
  }
}

template <int kVectors, typename T>
int64_t panels_of(int64_t hidden) {
  return ceil_div(hidden, kVectors * Vec<T>::size());
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent::cpu
