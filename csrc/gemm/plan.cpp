#ifdef TCH_EXTENSION_CUDA

#include "plan.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <cublasLt.h>

#include <cstring>
#include <optional>
#include <unordered_map>

#include "choice.h"
#include "key.h"
#include "padded.h"

namespace tch_extension::gemm {
namespace {

struct Plan {
  bool usable;
  Descriptors described;
  Choice choice;
};

struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t words[sizeof(Key) / sizeof(uint64_t)];
    static_assert(sizeof words == sizeof key);
    std::memcpy(words, &key, sizeof key);
    uint64_t hash = 0;
    for (const uint64_t word : words)
      hash = (hash ^ word) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
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

// Looks at sizes and strides only: nothing is started, waited for or allocated on the device, so
// that it may happen while a graph is captured. But for a thread's first handle: libtorch cannot
// make that in a capture, for its own products neither.
Plan make_plan(const Key& key, const void* bias) {
  Plan plan{};
  plan.described.handle = at::cuda::getCurrentCUDABlasLtHandle();
  if (const std::optional<Choice> chosen = choose(key, bias, plan.described)) {
    plan.usable = true;
    plan.choice = *chosen;
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

void relu_behind(const Product& product, cudaStream_t stream) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = product;
  const LaunchStatus status = finish_product({out, out, batch, m, n, m, n, kind, 1}, stream);
  TORCH_CHECK(status.error == nullptr, status.kernel, ": ", status.error);
}

bool start(const Key& key, const Product& product, cudaStream_t stream) {
  Plan& plan = find_plan(key, product.bias.data);
  if (!plan.usable) return false;
  Descriptors& described = plan.described;
  if (key.bias_as == Bias::kRow) set_bias(described, product.bias.data);
  const bool full = key.bias_as == Bias::kFull;
  // Most plans need none. Freed in the order of the stream.
  at::DataPtr workspace;
  const size_t bytes = plan.choice.workspace;
  if (bytes > 0) workspace = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  const cublasStatus_t status =
      cublasLtMatmul(described.handle, &described.product, factor(key, true), product.rhs.data,
                     &described.rhs, product.lhs.data, &described.lhs, factor(key, full),
                     full ? product.bias.data : product.out, &described.bias, product.out,
                     &described.out, &plan.choice.algorithm, workspace.get(), bytes, stream);
  // What the heuristic promises and the call then refuses: not asked again. Anything else is an
  // error of CUDA's.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      status == CUBLAS_STATUS_ARCH_MISMATCH) {
    plan.usable = false;
    // What it tried before it refused must not be taken for a failure of the next launch.
    (void)cudaGetLastError();
    return false;
  }
  check(status);
  if (plan.choice.relu_behind) relu_behind(product, stream);
  return true;
}

}  // namespace

bool run_plan(const Product& product, int32_t device, cudaStream_t stream) {
  const std::optional<Key> key = key_of(product, device);
  return key && start(*key, product, stream);
}

GemmCounters counters() {
  const Cache& known = cache();
  return {known.hits, known.misses, static_cast<int64_t>(known.plans.size())};
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
