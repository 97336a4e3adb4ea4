#ifdef TCH_EXTENSION_CUDA

#include "choice.h"

#include <ATen/cuda/CUDAContextLight.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <utility>

#include "tch_extension/kind.h"
#include "tch_extension/scalar_math.h"

namespace tch_extension::gemm {
namespace {

template <typename T>
void set(cublasLtMatmulPreferenceOpaque_t& preference,
         cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
}

// The results of cuBLASLt's heuristic for one workspace limit, best first.
struct Proposals {
  std::array<cublasLtMatmulHeuristicResult_t, 8> result;
  int count = 0;
};

Proposals propose(const Key& key, Descriptors& descriptors, uint64_t workspace) {
  cublasLtMatmulPreferenceOpaque_t preference;
  check(cublasLtMatmulPreferenceInit(&preference));
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(key.reductions));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
      static_cast<uint32_t>(key.rhs.alignment));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
      static_cast<uint32_t>(key.lhs.alignment));
  if (key.bias_as == Bias::kFull) {
    set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        static_cast<uint32_t>(key.bias.alignment));
  }
  Proposals proposals;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      descriptors.handle, &descriptors.product, &descriptors.rhs, &descriptors.lhs,
      &descriptors.bias, &descriptors.out, &preference, static_cast<int>(proposals.result.size()),
      proposals.result.data(), &proposals.count);
  if (status != CUBLAS_STATUS_SUCCESS) proposals.count = 0;
  return proposals;
}

// Returns -1 if the algorithm does not have this attribute.
int32_t attribute(const cublasLtMatmulAlgo_t& algorithm,
                  cublasLtMatmulAlgoConfigAttributes_t which) {
  int32_t value = -1;
  size_t written = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof value, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : -1;
}

bool is_one_of(int32_t value, std::initializer_list<int32_t> values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

// Whether the ReLU of a family (cuBLASLt's algorithm ID) replaces NaN with 0. These families
// compute it as max(x, 0), which is 0 for NaN. If split-K has a separate reduction kernel, the ReLU
// is in that kernel, which keeps NaN.
bool loses_nan(int32_t family, int32_t reduction) {
  const bool reduced_separately = reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE ||
                                  reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  return is_one_of(family, {20, 21, 23, 24}) && !reduced_separately;
}

// Whether the algorithm is known to satisfy relu(NaN) = NaN, which the operator promises. The
// listed families were seen to keep NaN in every kind in which that was measured, except in the
// cases of loses_nan. Other families may keep it, too.
bool keeps_nan(const cublasLtMatmulAlgo_t& algorithm) {
  const int32_t family = attribute(algorithm, CUBLASLT_ALGO_CONFIG_ID);
  const bool is_seen =
      is_one_of(family, {10, 11, 13, 14, 16, 20, 21, 22, 23, 24, 42, 43, 55, 56, 63, 66});
  return is_seen && !loses_nan(family, attribute(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME));
}

constexpr int32_t kLargeTile = CUBLASLT_MATMUL_TILE_256x128;
constexpr int32_t kSquareTile = CUBLASLT_MATMUL_TILE_128x128;
constexpr uint64_t kMostWorkspace = 32 << 20;  // libtorch's workspace for cuBLAS on an H200

int32_t tile_of(const cublasLtMatmulHeuristicResult_t& proposal) {
  return attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
}

// The number of 128×128 tiles of the output.
int64_t square_tiles(const Key& key) {
  constexpr int64_t kSize = 128;
  return key.batch * ceil_div(key.m, kSize) * ceil_div(key.n, kSize);
}

// The tile that was measured to be faster than the one proposed for the newest half-precision
// kernels. It is half as large, so that one block multiplies while another stores. Returns -1 if
// the proposed tile is as fast: if K is large, or if K is small and each multiprocessor gets two of
// the large tiles.
int32_t better_tile(const Key& key, const cublasLtMatmulHeuristicResult_t& proposal) {
  constexpr int32_t kNewest = 66;
  const bool is_newest = attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_ID) == kNewest;
  const bool is_large = tile_of(proposal) == kLargeTile;
  const int64_t tiles = square_tiles(key);
  const bool has_two = tiles > 384 && tiles < 640 && key.k <= 768;
  return is_newest && is_large && key.k <= 2048 && !has_two ? kSquareTile : -1;
}

// Whether the properties that cuBLASLt's documentation does not state were observed for this
// version, device and compute type: which kernels keep NaN, and that all rows of C may have the
// same address. They are not assumed elsewhere, because the same family has other kernels on
// another architecture and with fp16 accumulators.
bool was_seen(const Key& key) {
  constexpr size_t kSeenVersion = 130100;
  static const bool is_seen_version = cublasLtGetVersion() == kSeenVersion;
  const auto* device = at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(key.device));
  return is_seen_version && device->major == 9 && device->minor == 0 &&
         key.compute != CUBLAS_COMPUTE_16F;
}

bool needs_what_was_seen(const Key& key) {
  return key.relu || key.gelu || (key.bias_as == Bias::kFull && key.bias.leading < key.n);
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

int32_t parts_of(const cublasLtMatmulHeuristicResult_t& proposal) {
  return std::max(attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM), 1);
}

// Configures the f32 family that keeps NaN with the 256×128 tile of the first proposal. cuBLASLt
// proposes that family with smaller tiles, but the large tile was measured to be 1 to 13 % faster
// for K up to kMostInner. The result is empty if the first proposal uses split-K: it does so
// because there are few tiles, which would leave most of the GPU idle without split-K.
Proposal retiled(const Key& key, Descriptors& descriptors, const Proposals& proposals) {
  constexpr int32_t kKeepsNan = 55;
  constexpr int64_t kMostInner = 1024;
  const bool is_float = key.kind == kTchExtensionFloat && key.compute == CUBLAS_COMPUTE_32F;
  const int32_t tile = kLargeTile;
  const auto& first = proposals.result[0];
  if (!is_float || key.k > kMostInner || tile_of(first) != tile || parts_of(first) > 1)
    return std::nullopt;
  for (int i = 1; i < proposals.count; ++i) {
    auto algorithm = proposals.result[i].algo;
    if (attribute(algorithm, CUBLASLT_ALGO_CONFIG_ID) != kKeepsNan) continue;
    cublasLtMatmulHeuristicResult_t result;
    if (cublasLtMatmulAlgoConfigSetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile,
                                             sizeof tile) == CUBLAS_STATUS_SUCCESS &&
        cublasLtMatmulAlgoCheck(descriptors.handle, &descriptors.product, &descriptors.rhs,
                                &descriptors.lhs, &descriptors.bias, &descriptors.out, &algorithm,
                                &result) == CUBLAS_STATUS_SUCCESS &&
        result.workspaceSize <= kMostWorkspace) {
      result.algo = algorithm;
      return result;
    }
  }
  return std::nullopt;
}

bool is_tf32(const Key& key) { return key.compute == CUBLAS_COMPUTE_32F_FAST_TF32; }

// The number of multiplications and additions.
double work_of(const Key& key) {
  return 2.0 * static_cast<double>(key.batch) * static_cast<double>(key.m) *
         static_cast<double>(key.n) * static_cast<double>(key.k);
}

// Whether the algorithm splits K badly: its blocks add to the same memory one after another, or the
// parts of K are tiny. Such algorithms take up to ten times as long as others.
bool is_cut_badly(const Key& key, const cublasLtMatmulHeuristicResult_t& proposal) {
  const int64_t least_part = key.kind == kTchExtensionFloat ? 8 : 16;
  constexpr double kMuch = 7e8;  // with more work, serial additions do not matter
  const int32_t parts = parts_of(proposal);
  const bool takes_turns = attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) ==
                           CUBLASLT_REDUCTION_SCHEME_INPLACE;
  return (takes_turns && work_of(key) < kMuch) || (parts > 1 && key.k / parts < least_part);
}

// Whether this algorithm, which keeps NaN, is slower than a fast product without ReLU and a ReLU
// kernel after it. Some families take up to three times as long as the first proposal: those for
// any alignment, those without tensor cores, and those with large tiles on narrow products.
bool is_slower_than_a_pass(const Key& key, const cublasLtMatmulHeuristicResult_t& proposal) {
  constexpr int64_t kLong = 128;
  constexpr int64_t kLongWithoutTensorCores = 256;
  const int32_t family = attribute(proposal.algo, CUBLASLT_ALGO_CONFIG_ID);
  if (is_one_of(family, {16, 42})) return true;
  if (is_one_of(family, {11, 56, 63})) return key.k >= kLong;
  if (family == 55) return is_tf32(key) && key.k >= kLongWithoutTensorCores;
  if (family != 43) return false;
  const int64_t narrow = std::min(key.m, key.n);
  return narrow < 48 || key.k < 48 || (key.batch > 1 && narrow <= 64);
}

// The index of the first proposal that passes the test; -1 if none does.
template <typename Test>
int first_place(const Proposals& proposals, Test&& test) {
  for (int i = 0; i < proposals.count; ++i) {
    if (test(proposals.result[i])) return i;
  }
  return -1;
}

// Whether the split-K of `with`, a proposal that needs more workspace than libtorch grants, pays
// off compared with `without`, which does not need more. It does if there are so few tiles that
// much of the GPU is idle, and if the parts of K are long enough. Families 13 and 14 gain nothing:
// they are for a single row or column and read the matrix once.
bool is_worth_cutting(const Key& key, const cublasLtMatmulHeuristicResult_t& without,
                      const cublasLtMatmulHeuristicResult_t& with) {
  const int32_t family = attribute(without.algo, CUBLASLT_ALGO_CONFIG_ID);
  const bool is_float = key.kind == kTchExtensionFloat;
  const bool is_whole = parts_of(without) == 1;
  if (is_one_of(family, {13, 14})) return false;
  const float idle = is_float && !is_tf32(key) ? 0.65f : 0.45f;
  // The blocks of family 11 go through all of K, so that a second wave takes as long as the first.
  const bool is_twice_as_long = is_float && !is_tf32(key) && family == 11 &&
                                without.wavesCount > 1 && without.wavesCount <= 2;
  if (is_whole && without.wavesCount >= idle && !is_twice_as_long) return false;
  const int32_t parts = parts_of(with);
  if (!is_whole && parts <= parts_of(without)) return false;
  if (is_tf32(key)) return (key.k >= 1024 && parts >= 5) || (key.k >= 512 && parts >= 10);
  if (is_float) {
    // Family 11 is made for narrow products, for which family 20 splits K into too few parts.
    if (family == 11 && key.k < 1024) return false;
    const bool is_narrow = std::min(key.m, key.n) <= 16;
    if (is_narrow && parts < 16 && attribute(with.algo, CUBLASLT_ALGO_CONFIG_ID) == 20)
      return false;
    return (key.k >= 400 && parts >= 2) || (key.k >= 256 && parts >= 5);
  }
  // If there are only a few tiles and their blocks go through all of K, the product takes so long
  // that any other proposal is better.
  const bool is_lonely = is_whole && family != 11 && without.wavesCount < 0.05f;
  return key.k >= 256 && (parts >= 3 || is_lonely);
}

// The proposal that libtorch itself would choose, unless another was measured to be faster.
Proposal first_of(const Key& key, const Proposals& usual, const Proposals& larger) {
  const auto is_good = [&](const auto& proposal) {
    return is_allowed(key, proposal) && !is_cut_badly(key, proposal);
  };
  const int place = first_place(usual, is_good);
  const int of_larger = first_place(larger, is_good);
  if (place < 0) return of_larger < 0 ? std::nullopt : Proposal(larger.result[of_larger]);
  const auto& first = usual.result[place];
  if (of_larger >= 0 && is_worth_cutting(key, first, larger.result[of_larger]))
    return larger.result[of_larger];
  const Proposal better = first_of_tile(key, usual, better_tile(key, first));
  return better ? better : first;
}

// For a product whose first proposal loses NaN: the best-ranked proposal that keeps NaN and is not
// much slower. Proposals without split-K are skipped if the first proposal gains from split-K.
Proposal like_the_first(const Key& key, Descriptors& descriptors, const Proposals& usual,
                        const Proposals& larger) {
  if (usual.count > 0) {
    if (const Proposal like = retiled(key, descriptors, usual)) return like;
  }
  for (int i = 0; i < std::max(usual.count, larger.count); ++i) {
    for (const Proposals* proposals : {&larger, &usual}) {
      if (i >= proposals->count) continue;
      const auto& proposal = proposals->result[i];
      if (!is_allowed(key, proposal) || is_cut_badly(key, proposal)) continue;
      const bool is_whole = parts_of(proposal) == 1 && larger.count > 0 &&
                            !is_cut_badly(key, larger.result[0]) &&
                            is_worth_cutting(key, proposal, larger.result[0]);
      if (!is_whole && !is_slower_than_a_pass(key, proposal)) return proposal;
    }
  }
  return std::nullopt;
}

// For a product with a GELU: cuBLASLt's own order, because the rules of `first_of` were not
// measured for it.
Proposal first_with_gelu(const Key& key, Descriptors& descriptors) {
  const Proposals proposals = propose(key, descriptors, kMostWorkspace);
  return proposals.count > 0 ? Proposal(proposals.result[0]) : std::nullopt;
}

Proposal fitting(const Key& key, Descriptors& descriptors) {
  if (key.gelu) return first_with_gelu(key, descriptors);
  const Proposals usual = propose(key, descriptors, at::cuda::getCUDABlasLtWorkspaceSize());
  const Proposals larger = propose(key, descriptors, kMostWorkspace);
  const bool loses = usual.count > 0 && !is_allowed(key, usual.result[0]);
  if (loses) return like_the_first(key, descriptors, usual, larger);
  if (const Proposal found = first_of(key, usual, larger)) return found;
  const auto is_any = [&](const auto& proposal) { return is_allowed(key, proposal); };
  const int place = first_place(usual, is_any);
  return place < 0 ? std::nullopt : Proposal(usual.result[place]);
}

}  // namespace

std::optional<Choice> choose(const Key& key, const Pointers& pointers, Descriptors& descriptors) {
  const bool is_known = !needs_what_was_seen(key) || was_seen(key);
  if (is_known) {
    describe(key, pointers, descriptors);
    if (const Proposal found = fitting(key, descriptors))
      return Choice{found->algo, found->workspaceSize, false};
  }
  if (!key.relu) return std::nullopt;
  Key without = key;
  without.relu = 0;
  auto choice = choose(without, pointers, descriptors);
  if (choice) choice->relu_after = true;
  return choice;
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
