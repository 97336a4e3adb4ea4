#ifdef TCH_EXTENSION_CUDA

#include "plan.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <unordered_map>
#include <utility>

#include "key.h"
#include "tch_extension/kind.h"

namespace tch_extension::gemm {
namespace {

// Plain data, cuBLASLt's descriptors included: nothing has to be destroyed, whenever a thread ends.
struct Plan {
  bool usable;
  cublasLtHandle_t handle;
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t lhs;
  cublasLtMatrixLayoutOpaque_t rhs;
  cublasLtMatrixLayoutOpaque_t bias;
  cublasLtMatrixLayoutOpaque_t out;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace;
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t words[sizeof(Key) / sizeof(uint64_t)];
    static_assert(sizeof words == sizeof key);
    std::memcpy(words, &key, sizeof key);
    uint64_t hash = 0;
    for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
    return hash;
  }
};

struct Equal {
  bool operator()(const Key& a, const Key& b) const { return std::memcmp(&a, &b, sizeof a) == 0; }
};

// Shapes that change all the time must not fill the memory: then it begins anew.
constexpr size_t kMostPlans = 512;

// One for each thread, as libtorch has a handle for each: no lock, and a plan can be written to.
struct Cache {
  std::unordered_map<Key, Plan, Hash, Equal> plans;
  int64_t hits = 0;
  int64_t misses = 0;
};

Cache& cache() {
  thread_local Cache cache;
  return cache;
}

void check(cublasStatus_t status) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", cublasLtGetStatusString(status));
}

cudaDataType_t data_type(int32_t kind) {
  switch (kind) {
    case kTchExtensionHalf:
      return CUDA_R_16F;
    case kTchExtensionBFloat16:
      return CUDA_R_16BF;
    case kTchExtensionDouble:
      return CUDA_R_64F;
    default:
      return CUDA_R_32F;
  }
}

// Of the factors 0 and 1.
cudaDataType_t scale_type(const Key& key) {
  switch (key.compute) {
    case CUBLAS_COMPUTE_64F:
      return CUDA_R_64F;
    case CUBLAS_COMPUTE_16F:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

// In the type that the product is scaled in.
const void* factor(const Key& key, bool one) {
  static constexpr double kDouble[] = {0, 1};
  static constexpr float kFloat[] = {0, 1};
  static constexpr uint16_t kHalf[] = {0, 0x3C00};
  switch (scale_type(key)) {
    case CUDA_R_64F:
      return &kDouble[one];
    case CUDA_R_16F:
      return &kHalf[one];
    default:
      return &kFloat[one];
  }
}

cublasLtEpilogue_t epilogue(const Key& key) {
  if (key.bias_as == Bias::kRow) return key.relu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
  return key.relu ? CUBLASLT_EPILOGUE_RELU : CUBLASLT_EPILOGUE_DEFAULT;
}

template <typename T>
void set(cublasLtMatmulDescOpaque_t& product, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(cublasLtMatmulDescSetAttribute(&product, attribute, &value, sizeof value));
}

template <typename T>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute,
         const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
}

// A matrix of so many rows and columns as it lies in memory, columns first: its transpose, unless it is
// transposed.
cublasLtMatrixLayoutOpaque_t layout(const Key& key, int64_t rows, int64_t columns, const Operand& operand) {
  if (operand.transposed) std::swap(rows, columns);
  cublasLtMatrixLayoutOpaque_t layout;
  check(cublasLtMatrixLayoutInit(&layout, data_type(key.kind), columns, rows, operand.leading));
  if (key.batch > 1) {
    const auto batch = static_cast<int32_t>(key.batch);
    const int64_t stride = operand.batch_stride;
    check(
        cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
    check(cublasLtMatrixLayoutSetAttribute(&layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                           sizeof stride));
  }
  return layout;
}

void describe(const Key& key, const void* bias, Plan& plan) {
  check(
      cublasLtMatmulDescInit(&plan.product, static_cast<cublasComputeType_t>(key.compute), scale_type(key)));
  const auto operation = [](const Operand& operand) {
    return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  };
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, operation(key.rhs));
  set(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, operation(key.lhs));
  set(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(key));
  if (key.bias_as == Bias::kRow) {
    set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (key.batch > 1) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, key.bias.batch_stride);
  }
  const Operand out{key.n, key.m * key.n, 0, 0};
  plan.lhs = layout(key, key.m, key.k, key.lhs);
  plan.rhs = layout(key, key.k, key.n, key.rhs);
  plan.bias = layout(key, key.m, key.n, key.bias_as == Bias::kFull ? key.bias : out);
  plan.out = layout(key, key.m, key.n, out);
}

// What cuBLASLt proposes, best first, for so much workspace.
struct Proposals {
  std::array<cublasLtMatmulHeuristicResult_t, 8> result;
  int count = 0;
};

Proposals propose(const Key& key, Plan& plan, uint64_t workspace) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check(cublasLtMatmulPreferenceInit(&preference));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(key.reductions));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(key.rhs.alignment));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(key.lhs.alignment));
  if (key.bias_as == Bias::kFull) {
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(key.bias.alignment));
  }
  Proposals proposals;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      plan.handle, &plan.product, &plan.rhs, &plan.lhs, &plan.bias, &plan.out, &preference,
      static_cast<int>(proposals.result.size()), proposals.result.data(), &proposals.count);
  if (status != CUBLAS_STATUS_SUCCESS) proposals.count = 0;
  return proposals;
}

// -1 where an algorithm has none.
int32_t attribute(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
  int32_t value = -1;
  size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof value, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : -1;
}

bool is_one_of(int32_t value, std::initializer_list<int32_t> values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// Families of kernels whose ReLU is a maximum, of NaN and 0 therefore 0; where a kernel of its own adds up
// the parts of K, the ReLU is in that one, and NaN stays.
bool loses_nan(int32_t family, int32_t reduction) {
  const bool reduced_behind = reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE ||
                              reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  return is_one_of(family, {20, 21, 23, 24}) && !reduced_behind;
}

// Seen to keep NaN in each kind, where that was measured. Others may, too, but relu(NaN) = NaN is promised.
bool keeps_nan(const cublasLtMatmulAlgo_t& algorithm) {
  const int32_t family = attribute(algorithm, CUBLASLT_ALGO_CONFIG_ID);
  const bool is_seen = is_one_of(family, {10, 11, 13, 14, 16, 20, 21, 22, 23, 24, 42, 43, 55, 56, 63, 66});
  return is_seen && !loses_nan(family, attribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME));
}

// Whether cutting K into parts, which needs more workspace than libtorch grants, was measured to be worth it:
// where few tiles leave most of the GPU idle, and the other proposal is of an old family.
bool is_worth_cutting(const Key& key, const cublasLtMatmulAlgo_t& without, const cublasLtMatmulAlgo_t& with) {
  return key.k >= 256 && attribute(with, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) >= 3 &&
         is_one_of(attribute(without, CUBLASLT_ALGO_CONFIG_ID), {10, 20, 21, 23, 24, 55});
}

constexpr int32_t kLargeTile = CUBLASLT_MATMUL_TILE_256x128;
constexpr int32_t kSquareTile = CUBLASLT_MATMUL_TILE_128x128;
constexpr uint64_t kMostWorkspace = 32 << 20;  // what libtorch keeps for cuBLAS on an H200

int32_t tile_of(const cublasLtMatmulHeuristicResult_t& proposal) {
  return attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
}

// Of the output, in so many tiles.
int64_t square_tiles(const Key& key) {
  constexpr int64_t kSize = 128;
  return key.batch * ((key.m + kSize - 1) / kSize) * ((key.n + kSize - 1) / kSize);
}

// The tile that was measured to be faster than the proposed one of the newest kernels for the half kinds:
// half as large, so that one block multiplies while another stores. -1 where the proposed one is as fast: for
// long products, and for short ones of which each multiprocessor has two of the large tiles.
int32_t better_tile(const Key& key, const cublasLtMatmulHeuristicResult_t& proposal) {
  constexpr int32_t kNewest = 66;
  const bool is_newest = attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_ID) == kNewest;
  const bool is_large = tile_of(proposal) == kLargeTile;
  const int64_t tiles = square_tiles(key);
  const bool has_two = tiles > 384 && tiles < 640 && key.k <= 768;
  return is_newest && is_large && key.k <= 2048 && !has_two ? kSquareTile : -1;
}

// Where it was seen what cuBLASLt's documentation does not say: which kernels keep NaN, and that rows of C
// may all lie in the same place. The same family has other kernels on another architecture, and for sums in
// Half.
bool was_seen(const Key& key) {
  constexpr size_t kSeenVersion = 130100;
  static const bool is_seen_version = cublasLtGetVersion() == kSeenVersion;
  const auto* device = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(key.device));
  return is_seen_version && device->major == 9 && device->minor == 0 && key.compute != CUBLAS_COMPUTE_16F;
}

bool needs_what_was_seen(const Key& key) {
  return key.relu || (key.bias_as == Bias::kFull && key.bias.leading < key.n);
}

bool is_allowed(const Key& key, const cublasLtMatmulHeuristicResult_t& proposal) {
  return !key.relu || keeps_nan(proposal.algo);
}

using Proposal = std::optional<cublasLtMatmulHeuristicResult_t>;

Proposal first_of_tile(const Key& key, const Proposals& proposals, int32_t tile) {
  for (int i = 0; i < proposals.count; ++i) {
    const auto& proposal = proposals.result[i];
    if (tile_of(proposal) == tile && is_allowed(key, proposal)) return proposal;
  }
  return std::nullopt;
}

Proposal first_of(const Key& key, const Proposals& proposals) {
  const auto end = proposals.result.begin() + proposals.count;
  const auto found = std::find_if(proposals.result.begin(), end,
                                  [&](const auto& proposal) { return is_allowed(key, proposal); });
  return found == end ? std::nullopt : Proposal(*found);
}

// The proposed tile in the kernels of f32 that keep NaN, which cuBLASLt proposes with smaller ones: up to
// this K the large one was measured to be faster, by 1 to 13 %.
Proposal retiled(const Key& key, Plan& plan, const Proposals& proposals) {
  constexpr int32_t kKeepsNan = 55;
  constexpr int64_t kMostInner = 1024;
  const bool is_float = key.kind == kTchExtensionFloat && key.compute == CUBLAS_COMPUTE_32F;
  const int32_t tile = kLargeTile;
  if (!is_float || key.k > kMostInner || tile_of(proposals.result[0]) != tile) return std::nullopt;
  for (int i = 1; i < proposals.count; ++i) {
    auto algorithm = proposals.result[i].algo;
    if (attribute(algorithm, CUBLASLT_ALGO_CONFIG_ID) != kKeepsNan) continue;
    cublasLtMatmulHeuristicResult_t result;
    if (cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile) ==
            CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoCheck(plan.handle, &plan.product, &plan.rhs, &plan.lhs, &plan.bias, &plan.out,
                                &algorithm, &result) == CUBLAS_STATUS_SUCCESS &&
        result.workspaceSize <= kMostWorkspace) {
      result.algo = algorithm;
      return result;
    }
  }
  return std::nullopt;
}

// libtorch's own choice, unless another was measured to be faster, or it loses NaN; then one like it.
Proposal choose(const Key& key, Plan& plan) {
  const Proposals usual = propose(key, plan, at::cuda::getCUDABlasLtWorkspaceSize());
  const Proposals larger = propose(key, plan, kMostWorkspace);
  if (usual.count == 0) return first_of(key, larger);
  const auto& first = usual.result[0];
  if (larger.count > 0 && is_allowed(key, larger.result[0]) &&
      is_worth_cutting(key, first.algo, larger.result[0].algo)) {
    return larger.result[0];
  }
  if (is_allowed(key, first)) {
    const Proposal better = first_of_tile(key, usual, better_tile(key, first));
    return better ? better : first;
  }
  if (const Proposal like = retiled(key, plan, usual)) return like;
  for (const int32_t tile : {tile_of(first), kSquareTile}) {
    if (const Proposal like = first_of_tile(key, larger, tile)) return like;
    if (const Proposal like = first_of_tile(key, usual, tile)) return like;
  }
  const Proposal any = first_of(key, usual);
  return any ? any : first_of(key, larger);
}

// Looks at sizes and strides only: nothing is started, waited for or allocated on the device, so that it may
// happen while a graph is captured. But for a thread's first handle: libtorch cannot make that in a capture,
// for its own products neither.
Plan make_plan(const Key& key, const void* bias) {
  Plan plan{};
  if (needs_what_was_seen(key) && !was_seen(key)) return plan;
  plan.handle = at::cuda::getCurrentCUDABlasLtHandle();
  describe(key, bias, plan);
  if (const Proposal chosen = choose(key, plan)) {
    plan.usable = true;
    plan.algorithm = chosen->algo;
    plan.workspace = chosen->workspaceSize;
  }
  return plan;
}

// The thread's own, until the next call.
Plan& find_plan(const Key& key, const void* bias) {
  Cache& known = cache();
  const auto found = known.plans.find(key);
  if (found != known.plans.end()) {
    ++known.hits;
    return found->second;
  }
  ++known.misses;
  if (known.plans.size() >= kMostPlans) known.plans.clear();
  return known.plans.emplace(key, make_plan(key, bias)).first->second;
}

bool start(const Key& key, const Product& product, cudaStream_t stream) {
  Plan& plan = find_plan(key, product.bias.data);
  if (!plan.usable) return false;
  if (key.bias_as == Bias::kRow) set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias.data);
  const bool full = key.bias_as == Bias::kFull;
  // Most plans need none. Freed in the order of the stream.
  at::DataPtr workspace;
  if (plan.workspace > 0) workspace = c10::cuda::CUDACachingAllocator::get()->allocate(plan.workspace);
  const cublasStatus_t status = cublasLtMatmul(
      plan.handle, &plan.product, factor(key, true), product.rhs.data, &plan.rhs, product.lhs.data, &plan.lhs,
      factor(key, full), full ? product.bias.data : product.out, &plan.bias, product.out, &plan.out,
      &plan.algorithm, workspace.get(), plan.workspace, stream);
  // What the heuristic promises and the call then refuses: not asked again. Anything else is an error of
  // CUDA's.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      status == CUBLAS_STATUS_ARCH_MISMATCH) {
    plan.usable = false;
    // What it tried before it refused must not be taken for a failure of the next launch.
    (void)cudaGetLastError();
    return false;
  }
  check(status);
  return true;
}

}  // namespace

bool run_plan(const Product& product, int32_t device, cudaStream_t stream) {
  const std::optional<Key> key = key_of(product, device);
  return key && start(*key, product, stream);
}

Counters counters() {
  const Cache& known = cache();
  return {known.hits, known.misses, static_cast<int64_t>(known.plans.size())};
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
