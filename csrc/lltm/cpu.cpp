#include "tch_extension/cpu.h"

#include <algorithm>

#include "cell.h"
#include "lltm.h"
#include "team.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

// On the CPU the half kinds are computed as float from end to end.
template <typename Body>
void for_kind_of_sums(int32_t kind, Body body) {
  kind == kTchExtensionDouble ? body(Type<double>{}) : body(Type<float>{});
}

// One step: an item is a row.

template <typename Params>
int64_t rows(const Params& params) {
  return params.batch;
}

template <typename Params>
int64_t rows_of_a_thread(const Params& params) {
  constexpr int64_t kElements = 2048;
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, params.hidden));
}

template <typename T>
void step_forward(const LltmStepForward& params, int64_t row, int64_t column, int64_t count) {
  const int64_t hidden = params.hidden;
  const int64_t at = row * hidden + column;
  const int64_t at_gates = row * 3 * hidden + column;
  const auto gate = [&](int64_t index) {
    return load(static_cast<const T*>(params.input_gates) + at_gates + index * hidden, count) +
           load(static_cast<const T*>(params.hidden_gates) + at_gates + index * hidden, count) +
           load_or_zero<T>(params.bias, index * hidden + column, count);
  };
  T* activations = static_cast<T*>(params.activations);
  lltm_forward<T>({gate(0), gate(1), gate(2)},
                  {static_cast<const T*>(params.c) + at, static_cast<T*>(params.new_h) + at,
                   static_cast<T*>(params.new_c) + at,
                   activations == nullptr ? nullptr : activations + at_gates, hidden, count});
}

template <typename T>
void step_backward(const LltmStepBackward& params, int64_t row, int64_t column, int64_t count) {
  const int64_t hidden = params.hidden;
  const int64_t at = row * hidden + column;
  const int64_t at_gates = row * 3 * hidden + column;
  const Vec<T> grad_h =
      load_or_zero<T>(params.grad_output, at, count) + load_or_zero<T>(params.grad_h, at, count);
  lltm_backward<T>(grad_h,
                   {static_cast<const T*>(params.activations) + at_gates,
                    static_cast<const T*>(params.new_c) + at, static_cast<T*>(params.grad_c) + at,
                    static_cast<T*>(params.grad_gates) + at_gates, hidden, count});
}

template <typename T, typename Params, typename Body>
void for_each_vector(const Params& params, int64_t begin, int64_t end, Body body) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < params.hidden; column += kVecSize<T>) {
      body(params, row, column, std::min(kVecSize<T>, params.hidden - column));
    }
  }
}

// All steps. A panel is so many columns of h as some vectors hold; the weights that lead to them
// lie together, in the order in which the product reads them, with zeros behind the last column.

template <typename Params>
int64_t places(const Params& params) {
  return params.team.row_groups * params.team.column_groups;
}

template <typename Params>
int64_t one(const Params&) {
  return 1;
}

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kRows = 8;  // of a block: 24 of the 32 registers are sums
#else
constexpr int kRows = 4;
#endif

constexpr int kGates = 3;
constexpr int kGradVectors = 2;

template <int kCount>
struct Rows {
  static constexpr int count = kCount;
};

// Calls body(Rows<n>{}, row) for blocks of rows, as large ones as there are.
template <int kCount = kRows, typename Body>
void for_each_block(int64_t begin, int64_t end, Body body) {
  for (; begin + kCount <= end; begin += kCount) body(Rows<kCount>{}, begin);
  if constexpr (kCount > 1) for_each_block<kCount / 2>(begin, end, body);
}

// sums[row] = values[row] · panel, where the panel has kVectors vectors for each of the row's
// values. Each sum is added up in the same order whatever the block is: who computes a row does not
// show in its bits.
template <typename T, int kCount, int kVectors>
inline __attribute__((always_inline)) void multiply(const T* values, int64_t stride, int64_t depth,
                                                    const T* panel,
                                                    Vec<T> (&result)[kCount][kVectors]) {
  Vec<T> sums[kCount][kVectors];
#pragma GCC unroll 8
  for (int row = 0; row < kCount; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[row][v] = Vec<T>(T(0));
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
    for (int v = 0; v < kVectors; ++v) result[row][v] = sums[row][v];
  }
}

template <int kVectors, typename T>
int64_t panels_of(int64_t hidden) {
  return (hidden + kVectors * Vec<T>::size() - 1) / (kVectors * Vec<T>::size());
}

template <typename T>
struct Forward {
  const LltmPackedForward& params;
  const int64_t hidden = params.hidden;
  const int64_t lanes = Vec<T>::size();
  const int64_t panels = panels_of<1, T>(hidden);

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * hidden * kGates * lanes;
  }

  void pack(int64_t index) const {
    const T* weight = static_cast<const T*>(params.weight);
    T* to = panel(index);
    const int64_t column = index * lanes;
    const int64_t count = std::min(lanes, hidden - column);
    // Few k at a time, so that what is written stays in the first cache until its lines are whole.
    constexpr int64_t kDepth = 8;
    for (int64_t first = 0; first < hidden; first += kDepth) {
      const int64_t last = std::min(first + kDepth, hidden);
      for (int64_t gate = 0; gate < kGates; ++gate) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const T* row = weight + (gate * hidden + column + lane) * params.weight_stride;
          for (int64_t k = first; k < last; ++k) {
            to[(k * kGates + gate) * lanes + lane] = lane < count ? row[k] : T(0);
          }
        }
      }
    }
  }

  void step(int64_t t, LltmShare rows, LltmShare columns) const {
    const int64_t state = params.batch * hidden;
    const T* output = static_cast<const T*>(params.output);
    const T* h = t == 0 ? static_cast<const T*>(params.h0) : output + (t - 1) * state;
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      for_each_block(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Vec<T> sums[kCount][kGates];
        multiply<T, kCount, kGates>(h + row * hidden, hidden, hidden, panel(index), sums);
        for (int each = 0; each < kCount; ++each) finish(t, row + each, index * lanes, sums[each]);
      });
    }
  }

  void finish(int64_t t, int64_t row, int64_t column, const Vec<T> (&sums)[kGates]) const {
    const int64_t count = std::min(lanes, hidden - column);
    const int64_t at = row * hidden + column;
    const int64_t at_gates = (t * params.batch + row) * 3 * hidden + column;
    const T* gates = static_cast<const T*>(params.input_gates) + at_gates;
    T* c = static_cast<T*>(params.c) + at;
    T* activations = static_cast<T*>(params.activations);
    lltm_forward<T>(
        {load(gates, count) + sums[0], load(gates + hidden, count) + sums[1],
         load(gates + 2 * hidden, count) + sums[2]},
        {t == 0 ? static_cast<const T*>(params.c0) + at : c + (t - 1) * params.c_stride,
         static_cast<T*>(params.output) + t * params.batch * hidden + at, c + t * params.c_stride,
         activations == nullptr ? nullptr : activations + at_gates, hidden, count});
  }
};

template <typename T>
struct Backward {
  const LltmPackedBackward& params;
  const int64_t hidden = params.hidden;
  const int64_t lanes = Vec<T>::size();
  const int64_t columns_of_panel = kGradVectors * lanes;
  const int64_t panels = panels_of<kGradVectors, T>(hidden);

  T* panel(int64_t index) const {
    return static_cast<T*>(params.packed) + index * 3 * hidden * columns_of_panel;
  }

  void pack(int64_t index) const {
    const int64_t column = index * columns_of_panel;
    const int64_t count = std::min(columns_of_panel, hidden - column);
    T* to = panel(index);
    for (int64_t k = 0; k < 3 * hidden; ++k, to += columns_of_panel) {
      const T* row = static_cast<const T*>(params.weight) + k * params.weight_stride + column;
      std::fill(std::copy_n(row, count, to), to + columns_of_panel, T(0));
    }
  }

  // Step -1 is only the product, for h0.
  void step(int64_t t, LltmShare rows, LltmShare columns) const {
    for (int64_t index = columns.begin; index < columns.end; ++index) {
      for_each_block(rows.begin, rows.end, [&](auto block, int64_t row) {
        constexpr int kCount = decltype(block)::count;
        Vec<T> sums[kCount][kGradVectors];
        if (t + 1 < params.steps) {
          const T* behind = static_cast<const T*>(params.grad_gates) +
                            ((t + 1) * params.batch + row) * 3 * hidden;
          multiply<T, kCount, kGradVectors>(behind, 3 * hidden, 3 * hidden, panel(index), sums);
        }
        for (int each = 0; each < kCount; ++each) finish(t, row + each, index, sums[each]);
      });
    }
  }

  void finish(int64_t t, int64_t row, int64_t index, const Vec<T> (&sums)[kGradVectors]) const {
    for (int v = 0; v < kGradVectors; ++v) {
      const int64_t column = index * columns_of_panel + v * lanes;
      const int64_t count = std::min(lanes, hidden - column);
      if (count <= 0) return;
      const int64_t at = row * hidden + column;
      T* given = static_cast<T*>(params.grad_h) + at;
      if (t < 0) {
        store(sums[v], given, count);
        continue;
      }
      const Vec<T> from_behind = t + 1 < params.steps ? sums[v] : load(given, count);
      const int64_t state = (t * params.batch + row) * hidden + column;
      const int64_t gates = (t * params.batch + row) * 3 * hidden + column;
      lltm_backward<T>(
          load_or_zero<T>(params.grad_output, state, count) + from_behind,
          {static_cast<const T*>(params.activations) + gates,
           static_cast<const T*>(params.c) + state, static_cast<T*>(params.grad_c) + at,
           static_cast<T*>(params.grad_gates) + gates, hidden, count});
    }
  }
};

// What a thread of the team does: packing, and then each step from `first` in the direction of
// `by`.
template <typename Work>
void run(const Work& work, const LltmMember& member, int64_t first, int64_t by, int64_t steps) {
  const LltmTeam& team = member.team;
  // Once each in the code, whole: where they are called from several places, the compiler would
  // take them apart.
  const auto pack = [&](int64_t place) __attribute__((noinline)) {
    const LltmShare own(work.panels, place, member.places());
    for (int64_t index = own.begin; index < own.end; ++index) work.pack(index);
  };
  const auto step = [&](int64_t place, int64_t t) __attribute__((noinline)) {
    work.step(first + t * by, {work.params.batch, place / team.column_groups, team.row_groups},
              {work.panels, place % team.column_groups, team.column_groups});
  };
  member.run(steps, pack, step);
}

}  // namespace

static void lltm_step_forward(const LltmStepForward& params, int64_t begin, int64_t end) {
  for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_vector<T>(params, begin, end, step_forward<T>);
  });
}

static void lltm_step_backward(const LltmStepBackward& params, int64_t begin, int64_t end) {
  for_kind_of_sums(params.kind, [&](auto type) {
    using T = typename decltype(type)::type;
    for_each_vector<T>(params, begin, end, step_backward<T>);
  });
}

static void lltm_packed_forward(const LltmPackedForward& params, int64_t begin, int64_t end) {
  for_kind_of_sums(params.kind, [&](auto type) {
    run(Forward<typename decltype(type)::type>{params}, {params.team, begin, end}, 0, 1,
        params.steps);
  });
}

static void lltm_packed_backward(const LltmPackedBackward& params, int64_t begin, int64_t end) {
  const int64_t steps = params.steps + (params.needs_grad_h0 ? 1 : 0);
  for_kind_of_sums(params.kind, [&](auto type) {
    run(Backward<typename decltype(type)::type>{params}, {params.team, begin, end},
        params.steps - 1, -1, steps);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_step_forward, lltm_step_forward, LltmStepForward, rows,
                         rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_step_backward, lltm_step_backward, LltmStepBackward,
                         rows, rows_of_a_thread)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_packed_forward, lltm_packed_forward, LltmPackedForward,
                         places, one)
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_packed_backward, lltm_packed_backward,
                         LltmPackedBackward, places, one)
