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
#include "tch_extension/launch.h"

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

// A program whose shapes change all the time must not fill the memory: a full cache is cleared.
constexpr size_t kMostPlans = 512;

// Each thread has its own cache, as libtorch has a cuBLASLt handle per thread. So no lock is
// needed, and a plan can be modified.
struct Cache {
  std::unordered_map<Key, Plan, Hash, Equal> plans;
  int64_t hits = 0;
  int64_t misses = 0;
  int64_t gelus = 0;
};

Cache& cache() {
  thread_local Cache cache;
  return cache;
}

// Looks at sizes and strides only. It launches nothing, waits for nothing and allocates nothing on
// the device, so that it may run while a graph is captured. The exception is a thread's first
// cuBLASLt handle, which libtorch cannot create during a capture, not even for its own products.
Plan make_plan(const Key& key, const Pointers& pointers) {
  Plan plan{};
  plan.described.handle = at::cuda::getCurrentCUDABlasLtHandle();
  if (const std::optional<Choice> chosen = choose(key, pointers, plan.described)) {
    plan.usable = true;
    plan.choice = *chosen;
  }
  return plan;
}

// The reference points into this thread's cache and is valid until the next call.
Plan& find_plan(const Key& key, const Pointers& pointers) {
  Cache& known = cache();
  const auto found = known.plans.find(key);
  if (found != known.plans.end()) {
    ++known.hits;
    return found->second;
  }
  ++known.misses;
  if (known.plans.size() >= kMostPlans) known.plans.clear();
  return known.plans.emplace(key, make_plan(key, pointers)).first->second;
}

void relu_after(const Product& product, cudaStream_t stream) {
  const auto& [batch, m, n, k, lhs, rhs, bias, out, kind, relu] = product;
  const GemmFinishProduct finish{out, out, batch, m, n, m, n, kind, 1};
  const LaunchStatus status = tch_extension_gemm_finish_product_cuda(&finish, stream);
  TORCH_CHECK(status.error == nullptr, status.kernel, ": ", status.error);
}

bool start(const Key& key, const Product& product, const Epilogue& epilogue, cudaStream_t stream) {
  const Pointers pointers{product.bias.data, epilogue.z};
  Plan& plan = find_plan(key, pointers);
  if (!plan.usable) return false;
  Descriptors& described = plan.described;
  set_pointers(key, pointers, described);
  const bool full = key.bias_as == Bias::kFull;
  // Most plans need no workspace. The caching allocator frees it in stream order.
  at::DataPtr workspace;
  const size_t bytes = plan.choice.workspace;
  if (bytes > 0) workspace = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  const cublasStatus_t status =
      cublasLtMatmul(described.handle, &described.product, factor(key, true), product.rhs.data,
                     &described.rhs, product.lhs.data, &described.lhs, factor(key, full),
                     full ? product.bias.data : product.out, &described.bias, product.out,
                     &described.out, &plan.choice.algorithm, workspace.get(), bytes, stream);
  // The heuristic proposed the algorithm, but the call refuses it: this plan is not tried again.
  // Any other failure is a CUDA error.
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      status == CUBLAS_STATUS_ARCH_MISMATCH) {
    plan.usable = false;
    // Clear the error of the refused call, so that it is not reported as a failure of the next
    // launch.
    (void)cudaGetLastError();
    return false;
  }
  check(status);
  if (plan.choice.relu_after) relu_after(product, stream);
  cache().gelus += key.gelu;
  return true;
}

}  // namespace

bool run_plan(const Product& product, int32_t device, cudaStream_t stream,
              const Epilogue& epilogue) {
  const std::optional<Key> key = key_of(product, epilogue, device);
  return key && start(*key, product, epilogue, stream);
}

GemmCounters counters() {
  const Cache& known = cache();
  return {known.hits, known.misses, static_cast<int64_t>(known.plans.size()), known.gelus};
}

}  // namespace tch_extension::gemm

#endif  // TCH_EXTENSION_CUDA
