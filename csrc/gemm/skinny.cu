// Products with up to 4 columns or up to 4 rows, or 8 by tensor cores (skinny_tensor.cu). They are
// bound by memory bandwidth, and most of a tensor core's tile would be wasted on them. Operands may
// have any row stride and any address.
//
// The short factor has few rows or columns; the long factor has many and is read once. If K is
// contiguous in the long factor, a team of threads computes the sums of one row of it or of
// several. Otherwise the kernel is in skinny_columns.cu.
#include "skinny_operands.h"

namespace tch_extension::gemm {
namespace {

// The sum of values[lane % kValues] over a warp. At each step a lane keeps half of its values,
// sends the other half to its partner and adds what it receives. 16 values take 16 shuffles,
// whereas 16 separate sums would take 80.
template <int kValues, int kStep = 1, typename C>
__device__ __forceinline__ C warp_sums(const C (&values)[kValues]) {
  if constexpr (kValues > 1) {
    const bool is_odd = threadIdx.x & kStep;
    C half[kValues / 2];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const C even = values[2 * i];
      const C odd = values[2 * i + 1];
      half[i] = (is_odd ? odd : even) + __shfl_xor_sync(kAllLanes, is_odd ? even : odd, kStep);
    }
    return warp_sums<kValues / 2, 2 * kStep>(half);
  } else {
    C sum = values[0];
#pragma unroll
    for (int step = kStep; step < kWarp; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
    return sum;
  }
}

// A thread's partial sums of kRows rows of the long factor, along which K is contiguous. A thread
// loads kLanes consecutive values at a time, where kLanes is 1 unless all rows are aligned to more.
// The values of the short factor are read once for all kRows rows.
template <typename T, int kShorts, int kLanes, int kRows>
struct RowSums {
  using C = Compute<T>;

  C sum[kRows * kShorts] = {};

  template <bool kIsWhole>
  static __device__ __forceinline__ Vector<T, kLanes> load_few(const Skinny& skinny, const T* few,
                                                               int k) {
    if constexpr (kIsWhole) {
      return *reinterpret_cast<const Vector<T, kLanes>*>(few + k);
    } else {
      Vector<T, kLanes> values;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane)
        values.lane[lane] = few[(k + lane) * skinny.few.inner];
      return values;
    }
  }

  template <int kAhead, bool kIsWhole>
  __device__ __forceinline__ void add_some(const Skinny& skinny, const T* const (&rows)[kRows],
                                           const T* few, int64_t row_of_few, int first, int step) {
    const int inner = static_cast<int>(skinny.inner);
    Vector<T, kLanes> left[kAhead][kRows];
    Vector<T, kLanes> right[kAhead][kShorts];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int k = first + i * step;
      if (k >= inner) {
        // Zeros past the end of K take the place of a separate loop for the remainder, whose loads
        // would wait for one another.
#pragma unroll
        for (int r = 0; r < kRows; ++r) left[i][r] = Vector<T, kLanes>{};
#pragma unroll
        for (int s = 0; s < kShorts; ++s) right[i][s] = Vector<T, kLanes>{};
        continue;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        left[i][r] = *reinterpret_cast<const Vector<T, kLanes>*>(rows[r] + k);
#pragma unroll
      for (int s = 0; s < kShorts; ++s) {
        const int at = s < skinny.shorts ? s : 0;
        right[i][s] = load_few<kIsWhole>(skinny, few + at * row_of_few, k);
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int s = 0; s < kShorts; ++s) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int lane = 0; lane < kLanes; ++lane) {
            sum[r * kShorts + s] +=
                static_cast<C>(left[i][r].lane[lane]) * static_cast<C>(right[i][s].lane[lane]);
          }
        }
      }
    }
  }

  template <bool kIsWhole>
  __device__ __forceinline__ void add_all(const Skinny& skinny, const T* const (&rows)[kRows],
                                          const T* few, int64_t row_of_few, int member, int team) {
    // The number of vectors of its rows that a thread loads before it uses the first. It is lower
    // if the vectors are wide and the short factor has many rows, because they take registers that
    // other warps need.
    constexpr int kLoads = kLanes == 1 ? 8 : kLanes * sizeof(T) < 16 || kShorts <= 2 ? 4 : 1;
    constexpr int kAhead = kLoads > kRows ? kLoads / kRows : 1;
    const int inner = static_cast<int>(skinny.inner);
    const int step = team * kLanes;
    for (int k = member * kLanes; k < inner; k += kAhead * step)
      add_some<kAhead, kIsWhole>(skinny, rows, few, row_of_few, k, step);
  }

  // `copy` is the copy of the short factor in shared memory, or null if there is none.
  __device__ __forceinline__ void add(const Skinny& skinny, const T* copy, int64_t first_row,
                                      int member, int team) {
    const T* rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first_row + r < skinny.rows ? first_row + r : skinny.rows - 1;
      rows[r] = of_batch<T>(skinny.many) + row * skinny.many.row;
    }
    const T* few = of_batch<T>(skinny.few);
    if constexpr (kLanes > 1) {
      const bool is_copied = skinny.few_is == Few::kCopied;
      if (skinny.few_is != Few::kSingle) {
        const int64_t row_of_few = is_copied ? skinny.inner : skinny.few.row;
        return add_all<true>(skinny, rows, is_copied ? copy : few, row_of_few, member, team);
      }
    }
    add_all<false>(skinny, rows, few, skinny.few.row, member, team);
  }
};

// Copies the short factor to shared memory with K contiguous, so that it can be loaded in vectors.
template <typename T>
__device__ __forceinline__ const T* copy_few(const Skinny& skinny) {
  extern __shared__ __align__(16) unsigned char memory[];
  T* copy = reinterpret_cast<T*>(memory);
  const T* few = of_batch<T>(skinny.few);
  const int inner = static_cast<int>(skinny.inner);
  const int threads = blockDim.x * blockDim.y;
  for (int k = threadIdx.y * blockDim.x + threadIdx.x; k < inner; k += threads) {
    for (int s = 0; s < skinny.shorts; ++s)
      copy[s * inner + k] = few[s * skinny.few.row + k * skinny.few.inner];
  }
  __syncthreads();
  return copy;
}

constexpr int kMostTeam = 512;
constexpr int kManyRows = 4;

// Each team of blockDim.x threads computes kRows rows.
template <typename T, int kShorts, int kLanes, int kRows>
__global__ void __launch_bounds__(kMostTeam) skinny_rows_kernel(Skinny skinny) {
  using C = Compute<T>;
  constexpr int kValues = kRows * kShorts;
  __shared__ C parts[kMostTeam / kWarp][kValues];
  const int member = threadIdx.x;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y) * kRows;
  const int64_t row = first + member / kShorts;
  const int s = member % kShorts;
  const bool finishes = member < kValues && s < skinny.shorts && row < skinny.rows;
  // The bias is loaded first although it is needed last, to hide the latency of the load.
  const C bias = finishes ? bias_of<T>(skinny, row, s) : C(0);
  RowSums<T, kShorts, kLanes, kRows> sums;
  sums.add(skinny, skinny.few_is == Few::kCopied ? copy_few<T>(skinny) : nullptr, first, member,
           blockDim.x);
  C total = warp_sums(sums.sum);
  const int warps = blockDim.x / kWarp;
  if (warps > 1) {
    const int first_warp = threadIdx.y * warps;
    if (member % kWarp < kValues) parts[first_warp + member / kWarp][member % kWarp] = total;
    __syncthreads();
    if (member < kValues) {
      total = 0;
      for (int warp = 0; warp < warps; ++warp) total += parts[first_warp + warp][member];
    }
  }
  if (finishes) finish<T>(skinny, row, s, total + bias);
}

// Describes the product, or its transpose, so that the short factor is `few`.
Skinny skinny_of(const Product& product) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = product;
  Skinny skinny{};
  skinny.inner = k;
  skinny.relu = relu;
  const Skinny::Factor left{lhs.data, lhs.row, lhs.column, lhs.batch};
  const Skinny::Factor right{rhs.data, rhs.column, rhs.row, rhs.batch};
  // If both factors are short, the one in which K is contiguous is taken as the long factor, unless
  // K is too long for one block.
  constexpr int64_t kMostInner = 4096;
  const bool is_either = m <= kMostShort && n <= kMostShort && k > 1 && k <= kMostInner;
  const bool is_lhs_long =
      is_either && (lhs.column == 1) != (rhs.row == 1) ? lhs.column == 1 : n <= m;
  if (is_lhs_long) {
    skinny.many = left;
    skinny.few = right;
    skinny.bias = {bias.data, bias.row, bias.column, bias.batch};
    skinny.out = {out, n, 1, m * n};
    skinny.rows = m;
    skinny.shorts = static_cast<int32_t>(n);
  } else {
    skinny.many = right;
    skinny.few = left;
    skinny.bias = {bias.data, bias.column, bias.row, bias.batch};
    skinny.out = {out, 1, n, m * n};
    skinny.rows = n;
    skinny.shorts = static_cast<int32_t>(m);
  }
  return skinny;
}

bool is_by_rows(const Skinny& skinny) { return skinny.inner == 1 || skinny.many.inner == 1; }
bool is_by_columns(const Skinny& skinny) { return skinny.rows == 1 || skinny.many.row == 1; }

// Whether every row of the long factor can be loaded in vectors of `lanes` values.
template <typename T>
bool is_whole(const Skinny& skinny, int lanes) {
  return skinny.inner % lanes == 0 && is_even<T>(skinny.many, skinny.many.row, lanes);
}

template <typename T>
Few few_of(const Skinny& skinny, int lanes) {
  constexpr int64_t kMostCopied = 40 << 10;  // bytes; a block has 48 KiB without an opt-in
  if (skinny.few.inner == 1 && is_even<T>(skinny.few, skinny.few.row, lanes)) return Few::kWhole;
  return skinny.shorts * skinny.inner * static_cast<int64_t>(sizeof(T)) <= kMostCopied
             ? Few::kCopied
             : Few::kSingle;
}

template <typename T, int kShorts, int kLanes, int kRows>
void start_teams(const Skinny& skinny, int64_t batch, int team, cudaStream_t stream) {
  int teams = team < kThreads ? kThreads / team : 1;
  while (teams > 1 && teams / 2 * kRows >= skinny.rows) teams /= 2;
  const dim3 blocks(static_cast<unsigned int>(ceil_div(skinny.rows, teams * kRows)), 1,
                    static_cast<unsigned int>(batch));
  const size_t copied =
      skinny.few_is == Few::kCopied ? skinny.shorts * skinny.inner * sizeof(T) : 0;
  skinny_rows_kernel<T, kShorts, kLanes, kRows>
      <<<blocks, dim3(team, teams), copied, stream>>>(skinny);
}

// If a team has four rows, the short factor is read once for all four. That is done if there are
// enough rows to keep the GPU busy; a team is then one warp, or several if one warp per team would
// be too few threads. Otherwise a team has one row, and each thread has kSteps vectors of K, or
// fewer if that would be too few threads.
template <typename T, int kShorts, int kLanes>
void start_rows_by(Skinny skinny, int64_t batch, cudaStream_t stream) {
  constexpr int64_t kFewThreads = 132 * 512;  // fewer leave multiprocessors idle
  constexpr int64_t kManyTeams = 132 * 4;
  if (kLanes > 1) skinny.few_is = few_of<T>(skinny, kLanes);
  const int64_t rows = skinny.rows * batch;
  const int64_t teams = ceil_div(skinny.rows, kManyRows) * batch;
  int team = 32;
  const auto is_long = [&] {
    return team < kMostTeam && team * 2 * kSteps * kLanes <= skinny.inner;
  };
  const bool are_many =
      teams >= kManyTeams || teams * skinny.inner >= kFewThreads * kSteps * kLanes;
  if (skinny.rows >= kManyRows && are_many) {
    while (is_long() && teams * team < 2 * kFewThreads) team *= 2;
    return start_teams<T, kShorts, kLanes, kManyRows>(skinny, batch, team, stream);
  }
  const auto is_idle = [&] {
    return team < kMostTeam && rows * team < kFewThreads && team * 2 * kLanes <= skinny.inner;
  };
  while (is_long() || is_idle()) team *= 2;
  start_teams<T, kShorts, kLanes, 1>(skinny, batch, team, stream);
}

// Whether vectors of `lanes` values pay off. They do not if the short factor has to be loaded value
// by value, because the addresses within a warp would then be `lanes` values apart.
template <typename T>
bool is_read_by(const Skinny& skinny, int lanes) {
  return is_whole<T>(skinny, lanes) && few_of<T>(skinny, lanes) != Few::kSingle;
}

template <typename T, int kShorts>
void start_rows(const Skinny& skinny, int64_t batch, cudaStream_t stream) {
  constexpr int kLanes = kLanesOf16Bytes<T>;
  // In f64 the arithmetic takes as long as the loads, so that vectors gain nothing.
  if constexpr (kLanes > 2) {
    if (is_read_by<T>(skinny, kLanes))
      return start_rows_by<T, kShorts, kLanes>(skinny, batch, stream);
    if (is_read_by<T>(skinny, 2)) return start_rows_by<T, kShorts, 2>(skinny, batch, stream);
  }
  start_rows_by<T, kShorts, 1>(skinny, batch, stream);
}

}  // namespace
}  // namespace tch_extension::gemm

using namespace tch_extension;
using namespace tch_extension::gemm;

extern "C" bool tch_extension_gemm_skinny_facts_cuda(const GemmProduct* product,
                                                     GemmSkinny* result) {
  constexpr int64_t kMostBlocks = 65535;
  constexpr int64_t kMost = INT32_MAX - 65536;  // leaves room to add a step in 32 bits
  const int64_t shorts = product->m < product->n ? product->m : product->n;
  if (shorts > kMostShortByTensor) return false;
  const Skinny skinny = skinny_of(*product);
  const bool by_tensor = is_for_tensor_cores(skinny, product->kind);
  if (shorts > kMostShort && !by_tensor) return false;
  const bool by_rows = is_by_rows(skinny);
  if (!(by_rows || is_by_columns(skinny)) || product->batch > kMostBlocks || product->k > kMost)
    return false;
  *result = {skinny.rows, skinny.shorts, by_rows, by_tensor};
  return true;
}

extern "C" LaunchStatus tch_extension_gemm_skinny_cuda(const GemmProduct* product,
                                                       cudaStream_t stream) {
  const Skinny skinny = skinny_of(*product);
  if (is_for_tensor_cores(skinny, product->kind)) {
    start_skinny_tensor({{skinny}, 1, false, nullptr, 0}, product->kind, product->batch, stream);
    return launch_status("skinny_product");
  }
  if (!is_by_rows(skinny)) {
    start_skinny_columns(skinny, product->kind, product->batch, stream);
    return launch_status("skinny_product");
  }
  for_kind(product->kind, [&](auto type) {
    using T = typename decltype(type)::type;
    switch (skinny.shorts) {
      case 1:
        return start_rows<T, 1>(skinny, product->batch, stream);
      case 2:
        return start_rows<T, 2>(skinny, product->batch, stream);
      default:
        return start_rows<T, 4>(skinny, product->batch, stream);
    }
  });
  return launch_status("skinny_product");
}

extern "C" LaunchStatus tch_extension_gemm_skinny_together_cuda(const GemmProduct* products,
                                                                int32_t count,
                                                                const void* norm_weight,
                                                                float norm_eps, bool is_gated,
                                                                cudaStream_t stream) {
  constexpr const char* kName = "skinny_products";
  if (count < 1 || count > kMostTogether) return {kName, "internal error: too many products"};
  SkinnyGroup group{{}, count, is_gated, norm_weight, norm_eps};
  for (int which = 0; which < count; ++which) group.each[which] = skinny_of(products[which]);
  start_skinny_tensor(group, products[0].kind, 1, stream);
  return launch_status(kName);
}
