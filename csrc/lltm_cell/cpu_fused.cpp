#include "../recurrent/cells/lltm_pointwise.h"
#include "lltm_cell.h"
#include "tch_extension/cpu_small_product.h"

// The most columns of [h, x] in the forward, H + F: it keeps that many of its operands on the
// stack.
constexpr int64_t kMostColumns = 1024;

// The parameters of the backward's two kernels. The first writes grad_gates and the second reads
// it.
struct LltmCellCpuBackward : LltmCellFusedBackward {
  void* grad_gates;  // [B, 3H]
};

namespace tch_extension {
inline namespace CPU_CAPABILITY {

namespace {

// A work item is this many hidden columns, with all three gates. The number is the same for every
// instruction set, and is a multiple of each vector size.
constexpr int64_t kBlock = 16;

int64_t blocks(int64_t hidden) { return (hidden + kBlock - 1) / kBlock; }

int64_t forward_items(const LltmCellFusedForward& params) { return blocks(params.hidden); }

int64_t gates_items(const LltmCellCpuBackward& params) { return blocks(params.hidden); }

// The work items of the kernel that computes the gradients of h and of the input.
int64_t inputs_items(const LltmCellCpuBackward& params) {
  return (params.grad_h == nullptr ? 0 : blocks(params.hidden)) +
         (params.grad_input == nullptr ? 0 : blocks(params.features));
}

// Waking a thread costs as much as this many multiplications.
constexpr int64_t kGrain = 1 << 18;

int64_t grain_of(int64_t multiplications_per_item) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, multiplications_per_item));
}

int64_t forward_grain(const LltmCellFusedForward& params) {
  return grain_of(params.batch * 3 * kBlock * (params.hidden + params.features));
}

int64_t gates_grain(const LltmCellCpuBackward& params) {
  return grain_of(params.batch * 3 * kBlock * (params.hidden + params.features));
}

int64_t inputs_grain(const LltmCellCpuBackward& params) {
  return grain_of(params.batch * 3 * kBlock * params.hidden);
}

// The forward's product is computed transposed, so that the weight need not be: its rows are hidden
// columns, from which it reads single values, and its vectors hold values of several rows of the
// batch.
template <typename T, int kVectors>
struct ForwardTile {
  static constexpr int64_t kSize = Vec<T>::size();
  static constexpr int64_t kRows = kVectors * kSize;  // rows of the batch

  alignas(64) T columns[kMostColumns * kRows];  // [h, x]ᵀ
  alignas(64) T product[kBlock * kRows];
  alignas(64) T gates[kRows][3][kBlock];

  void load_columns(const LltmCellFusedForward& params, int64_t first_row, int64_t rows) {
    const Rows<T> h{static_cast<const T*>(params.h), params.h_stride};
    const Rows<T> input{static_cast<const T*>(params.input), params.input_stride};
    load_columns(h, first_row, rows, params.hidden, columns);
    load_columns(input, first_row, rows, params.features, columns + params.hidden * kRows);
  }

  void multiply(const LltmCellFusedForward& params, int64_t first_column, int64_t count) {
    const int64_t inner = params.hidden + params.features;
    for (int64_t gate = 0; gate < 3; ++gate) {
      const T* weight = static_cast<const T*>(params.weight) +
                        (gate * params.hidden + first_column) * params.weight_stride;
      small_product<T>({weight, params.weight_stride, 1}, {columns, kRows}, count, inner, kRows,
                       product, kRows);
      for (int64_t row = 0; row < kRows; row += kSize) {
        for (int64_t column = 0; column < count; column += kSize) {
          transpose_block(product + column * kRows + row, kRows, count - column, kSize,
                          &gates[row][gate][column], 3 * kBlock);
        }
      }
    }
  }

 private:
  static void load_columns(Rows<T> from, int64_t first_row, int64_t rows, int64_t count, T* to) {
    for (int64_t row = 0; row < kRows; row += kSize) {
      for (int64_t column = 0; column < count; column += kSize) {
        const int64_t left = std::min(kSize, count - column);
        T block[kSize * kSize];
        transpose_block(from.data + (first_row + row) * from.inner + column, from.inner, rows - row,
                        left, block, kSize);
        for (int64_t line = 0; line < left; ++line) {
          Vec<T>::loadu(block + line * kSize).store(to + (column + line) * kRows + row);
        }
      }
    }
  }
};

// Computes the blocks [begin, end) of hidden columns, for the rows [first_row, last_row).
template <typename T, int kVectors>
void forward_rows(const LltmCellFusedForward& params, int64_t begin, int64_t end, int64_t first_row,
                  int64_t last_row) {
  using Tile = ForwardTile<T, kVectors>;
  const int64_t hidden = params.hidden;
  Tile tile;
  for (; first_row < last_row; first_row += Tile::kRows) {
    const int64_t rows = std::min(Tile::kRows, last_row - first_row);
    tile.load_columns(params, first_row, rows);
    for (int64_t first = begin * kBlock; first < std::min(hidden, end * kBlock); first += kBlock) {
      const int64_t columns = std::min(kBlock, hidden - first);
      tile.multiply(params, first, columns);
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; column += Tile::kSize) {
          const int64_t count = std::min(Tile::kSize, columns - column);
          const int64_t at = (first_row + row) * hidden + first + column;
          const auto gate = [&](int64_t index) {
            return Vec<T>::loadu(&tile.gates[row][index][column]) +
                   load_or_zero<T>(params.bias, index * hidden + first + column, count);
          };
          const Vec<T> g = gate(2);
          const T* c = static_cast<const T*>(params.c) + (first_row + row) * params.c_stride +
                       first + column;
          const LltmCellStep<T> step(gate(0), gate(1), g, load(c, count));
          store(step.new_h, static_cast<T*>(params.new_h) + at, count);
          if (params.output != nullptr)
            store(step.new_h, static_cast<T*>(params.output) + at, count);
          store(step.new_c, static_cast<T*>(params.new_c) + at, count);
          if (params.activations != nullptr) {
            T* activations = static_cast<T*>(params.activations) + (first_row + row) * 3 * hidden +
                             first + column;
            store(step.i, activations, count);
            store(step.o, activations + hidden, count);
            store(g, activations + 2 * hidden, count);
          }
        }
      }
    }
  }
}

template <typename T>
void forward(const LltmCellFusedForward& params, int64_t begin, int64_t end) {
  constexpr int64_t kSize = Vec<T>::size();
  const int64_t left_over = params.batch % (2 * kSize);
  const int64_t in_pairs = left_over > kSize ? params.batch : params.batch - left_over;
  if (in_pairs > 0) forward_rows<T, 2>(params, begin, end, 0, in_pairs);
  if (in_pairs < params.batch) forward_rows<T, 1>(params, begin, end, in_pairs, params.batch);
}

template <typename T>
void gradients_of_gates(const LltmCellCpuBackward& params, int64_t first, int64_t columns) {
  const int64_t hidden = params.hidden;
  for (int64_t row = 0; row < params.batch; ++row) {
    for (int64_t column = first; column < first + columns; column += kVecSize<T>) {
      const int64_t count = std::min(kVecSize<T>, first + columns - column);
      const int64_t at = row * hidden + column, at_gate = row * 3 * hidden + column;
      const auto activation = [&](int64_t index) {
        return load(static_cast<const T*>(params.activations) + at_gate + index * hidden, count);
      };
      const LltmCellGradient<T> grad(activation(0), activation(1), activation(2),
                                     load(static_cast<const T*>(params.new_c) + at, count),
                                     load_or_zero<T>(params.grad_new_h, at, count),
                                     load_or_zero<T>(params.grad_new_c, at, count));
      T* to = static_cast<T*>(params.grad_gates) + at_gate;
      store(grad.i, to, count);
      store(grad.o, to + hidden, count);
      store(grad.g, to + 2 * hidden, count);
      if (params.grad_c != nullptr) store(grad.c, static_cast<T*>(params.grad_c) + at, count);
    }
  }
}

// Computes dGᵀ [h, x] for some columns of dG, which are rows of the result.
template <typename T>
void gradient_of_weight(const LltmCellCpuBackward& params, int64_t first, int64_t columns) {
  const int64_t hidden = params.hidden, features = params.features, width = hidden + features;
  const Scattered<T> grad{static_cast<const T*>(params.grad_gates) + first, 1, 3 * hidden};
  T* to = static_cast<T*>(params.grad_weight) + first * width;
  small_product<T>(grad, {static_cast<const T*>(params.h), params.h_stride}, columns, params.batch,
                   hidden, to, width);
  small_product<T>(grad, {static_cast<const T*>(params.input), params.input_stride}, columns,
                   params.batch, features, to + hidden, width);
}

template <typename T>
void gradient_of_bias(const LltmCellCpuBackward& params, int64_t first, int64_t columns) {
  for (int64_t column = first; column < first + columns; column += kVecSize<T>) {
    const int64_t count = std::min(kVecSize<T>, first + columns - column);
    Vec<T> sum(T(0));
    for (int64_t row = 0; row < params.batch; ++row) {
      sum = sum + load(static_cast<const T*>(params.grad_gates) + row * 3 * params.hidden + column,
                       count);
    }
    store(sum, static_cast<T*>(params.grad_bias) + column, count);
  }
}

template <typename T>
void backward_gates(const LltmCellCpuBackward& params, int64_t begin, int64_t end) {
  for (int64_t first = begin * kBlock; first < std::min(params.hidden, end * kBlock);
       first += kBlock) {
    const int64_t columns = std::min(kBlock, params.hidden - first);
    gradients_of_gates<T>(params, first, columns);
    for (int64_t gate = 0; gate < 3; ++gate) {
      const int64_t column = gate * params.hidden + first;
      if (params.grad_weight != nullptr) gradient_of_weight<T>(params, column, columns);
      if (params.grad_bias != nullptr) gradient_of_bias<T>(params, column, columns);
    }
  }
}

// Computes some columns of dG W: the blocks [begin, end) of a matrix whose columns begin at
// `offset` in W.
template <typename T>
void gradient_of_input(const LltmCellCpuBackward& params, int64_t offset, void* to, int64_t width,
                       int64_t begin, int64_t end) {
  const int64_t gates = 3 * params.hidden, first = begin * kBlock;
  if (to == nullptr || begin >= end) return;
  const T* weight = static_cast<const T*>(params.weight) + offset + first;
  small_product<T>({static_cast<const T*>(params.grad_gates), gates, 1},
                   {weight, params.weight_stride}, params.batch, gates,
                   std::min(width, end * kBlock) - first, static_cast<T*>(to) + first, width);
}

template <typename T>
void backward_inputs(const LltmCellCpuBackward& params, int64_t begin, int64_t end) {
  const int64_t of_h = params.grad_h == nullptr ? 0 : blocks(params.hidden);
  gradient_of_input<T>(params, 0, params.grad_h, params.hidden, begin, std::min(end, of_h));
  gradient_of_input<T>(params, params.hidden, params.grad_input, params.features,
                       std::max<int64_t>(0, begin - of_h), end - of_h);
}

// Calls body(Type<T>{}) for the kinds that small_product supports.
template <typename Body>
void for_wide_kind(int32_t kind, Body body) {
  if (kind == kTchExtensionFloat) body(Type<float>{});
  if (kind == kTchExtensionDouble) body(Type<double>{});
}

}  // namespace

static void lltm_cell_fused_forward(const LltmCellFusedForward& params, int64_t begin,
                                    int64_t end) {
  for_wide_kind(params.kind,
                [&](auto type) { forward<typename decltype(type)::type>(params, begin, end); });
}

static void lltm_cell_fused_gates(const LltmCellCpuBackward& params, int64_t begin, int64_t end) {
  for_wide_kind(params.kind, [&](auto type) {
    backward_gates<typename decltype(type)::type>(params, begin, end);
  });
}

static void lltm_cell_fused_inputs(const LltmCellCpuBackward& params, int64_t begin, int64_t end) {
  for_wide_kind(params.kind, [&](auto type) {
    backward_inputs<typename decltype(type)::type>(params, begin, end);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_fused_forward, lltm_cell_fused_forward,
                         LltmCellFusedForward, forward_items, forward_grain)
extern "C" void tch_extension_lltm_cell_fused_gates_cpu(const LltmCellCpuBackward*) noexcept;
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_fused_gates, lltm_cell_fused_gates,
                         LltmCellCpuBackward, gates_items, gates_grain)
extern "C" void tch_extension_lltm_cell_fused_inputs_cpu(const LltmCellCpuBackward*) noexcept;
TCH_EXTENSION_CPU_KERNEL(tch_extension_lltm_cell_fused_inputs, lltm_cell_fused_inputs,
                         LltmCellCpuBackward, inputs_items, inputs_grain)

#if defined(CPU_CAPABILITY_DEFAULT)
// `grad_gates` is scratch memory, [B, 3H].
extern "C" void tch_extension_lltm_cell_fused_backward_cpu(const LltmCellFusedBackward* params,
                                                           void* grad_gates) noexcept {
  const LltmCellCpuBackward with_scratch{*params, grad_gates};
  tch_extension_lltm_cell_fused_gates_cpu(&with_scratch);
  tch_extension_lltm_cell_fused_inputs_cpu(&with_scratch);
}
#endif
