// Sums of the columns of a matrix on the CPU. The matrix need not exist in memory: a loader returns
// its vectors.
//
//   column_sums<T>(sums, begin, end,
//                  [&](int64_t row, int64_t column, int64_t count) { return ...; });
//   finish_column_sums<T>(sums, begin, end);  // if there are several slabs
//
// [begin, end) is a range of the column_sums_items(sums) or finish_column_sums_items(sums) items.
//
// Needs: torch's headers.
#pragma once

#include "tch_extension/column_sums.h"
#include "tch_extension/cpu.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// An item of work is a tile of this many columns in one slab; it is the same for every instruction
// set.
constexpr int64_t kTileColumns = 64;
// The rows are cut into runs of this many. Each run is summed, and then the sums of the runs.
// Rounding errors then grow with the length of a run and with the number of runs, not with their
// product.
constexpr int64_t kRunRows = 32;

inline int64_t column_tiles(const TchExtensionColumnSums& sums) {
  return (sums.columns + kTileColumns - 1) / kTileColumns;
}

inline int64_t column_sums_items(const TchExtensionColumnSums& sums) {
  return sums.slabs * column_tiles(sums);
}

inline int64_t finish_column_sums_items(const TchExtensionColumnSums& sums) {
  return column_tiles(sums);
}

// The same grain as in libtorch: waking a thread costs as much as adding thousands of elements.
inline int64_t column_sums_grain(const TchExtensionColumnSums& sums) {
  constexpr int64_t kElements = 32768;
  const int64_t rows = std::max<int64_t>(1, sums.rows / std::max<int64_t>(1, sums.slabs));
  return std::max<int64_t>(
      1, kElements / (rows * std::min(kTileColumns, std::max<int64_t>(1, sums.columns))));
}

inline int64_t finish_column_sums_grain(const TchExtensionColumnSums&) { return 4; }

// Sums the rows [begin, end) of `width` columns from `first` on. If kWhole, there are kTileColumns
// of them.
template <typename T, bool kWhole, typename Load, typename Store>
void sum_tile(int64_t begin, int64_t end, int64_t first, int64_t width, Load load,
              Store store_sum) {
  using V = Vec<Compute<T>>;
  constexpr int64_t kStep = kVecSize<T>;
  constexpr int64_t kMost = kTileColumns / kStep;
  static_assert(kTileColumns % kStep == 0, "whole vectors");
  const int64_t vectors = kWhole ? kMost : (width + kStep - 1) / kStep;
  const auto count = [&](int64_t vector) {
    return kWhole ? kStep : std::min(kStep, width - vector * kStep);
  };
  V total[kMost];
  for (int64_t vector = 0; vector < kMost; ++vector) total[vector] = V(0);
  for (int64_t row = begin; row < end;) {
    V run[kMost];
    for (int64_t vector = 0; vector < kMost; ++vector) run[vector] = V(0);
    for (const int64_t last = std::min(end, row + kRunRows); row < last; ++row) {
      for (int64_t vector = 0; vector < vectors; ++vector) {
        run[vector] = run[vector] + load(row, first + vector * kStep, count(vector));
      }
    }
    for (int64_t vector = 0; vector < vectors; ++vector)
      total[vector] = total[vector] + run[vector];
  }
  for (int64_t vector = 0; vector < vectors; ++vector) {
    store_sum(total[vector], first + vector * kStep, count(vector));
  }
}

template <typename T, typename Load, typename Store>
void sum_tile(int64_t begin, int64_t end, int64_t first, int64_t width, Load load,
              Store store_sum) {
  width == kTileColumns ? sum_tile<T, true>(begin, end, first, width, load, store_sum)
                        : sum_tile<T, false>(begin, end, first, width, load, store_sum);
}

// Calls load(row, column, count) once for each vector of the matrix.
template <typename T, typename Load>
void column_sums(const TchExtensionColumnSums& sums, int64_t begin, int64_t end, Load load_values) {
  using V = Vec<Compute<T>>;
  const int64_t tiles = column_tiles(sums);
  const int64_t slab_rows = (sums.rows + sums.slabs - 1) / sums.slabs;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t slab = item / tiles;
    const int64_t first = (item % tiles) * kTileColumns;
    const int64_t from = std::min(sums.rows, slab * slab_rows);
    const int64_t to = std::min(sums.rows, from + slab_rows);
    const auto keep = [&](const V& sum, int64_t column, int64_t count) {
      if (sums.slabs == 1) return store(sum, static_cast<T*>(sums.sums) + column, count);
      store(sum, static_cast<Compute<T>*>(sums.partial) + slab * sums.columns + column, count);
    };
    sum_tile<T>(from, to, first, std::min(kTileColumns, sums.columns - first), load_values, keep);
  }
}

template <typename T>
void finish_column_sums(const TchExtensionColumnSums& sums, int64_t begin, int64_t end) {
  using V = Vec<Compute<T>>;
  const auto* partial = static_cast<const Compute<T>*>(sums.partial);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * kTileColumns;
    const auto load_values = [&](int64_t slab, int64_t column, int64_t count) {
      return load(partial + slab * sums.columns + column, count);
    };
    const auto keep = [&](const V& sum, int64_t column, int64_t count) {
      store(sum, static_cast<T*>(sums.sums) + column, count);
    };
    sum_tile<T>(0, sums.slabs, first, std::min(kTileColumns, sums.columns - first), load_values,
                keep);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
