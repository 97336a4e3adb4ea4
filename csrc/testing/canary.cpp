// Allocations with canaries around them, for a thread that asks for them. A canary is a byte of a
// known value; a write outside the allocation overwrites it.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

namespace {

// The number of canaries on either side, a multiple of every alignment that libtorch's kernels
// check.
constexpr size_t kMargin = 64;
constexpr unsigned char kCanary = 0xA5;

struct Watch;

struct Block {
  at::DataPtr memory;  // including the margins
  size_t len;          // without the margins
  std::shared_ptr<Watch> watch;

  unsigned char* begin() const { return static_cast<unsigned char*>(memory.get()); }

  bool intact() const {
    auto alive = [](unsigned char byte) { return byte == kCanary; };
    const unsigned char* after = begin() + kMargin + len;
    return std::all_of(begin(), begin() + kMargin, alive) &&
           std::all_of(after, after + kMargin, alive);
  }
};

struct Watch {
  std::mutex mutex;
  std::unordered_set<Block*> living;
  size_t broken = 0;  // number of freed blocks with overwritten canaries
};

thread_local std::shared_ptr<Watch> watch_of_this_thread;

void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  std::lock_guard<std::mutex> lock(block->watch->mutex);
  block->watch->living.erase(block.get());
  if (!block->intact()) ++block->watch->broken;
}

// Takes the place of libtorch's own allocator, to which it passes on everything except the requests
// of a watching thread.
class CanaryAllocator final : public c10::Allocator {
 public:
  explicit CanaryAllocator(c10::Allocator* next) : next_(next) {}

  c10::DataPtr allocate(size_t len) override {
    const std::shared_ptr<Watch> watch = watch_of_this_thread;
    if (watch == nullptr || len == 0) return next_->allocate(len);
    auto block = std::make_unique<Block>(Block{next_->allocate(len + 2 * kMargin), len, watch});
    std::memset(block->begin(), kCanary, kMargin);
    std::memset(block->begin() + kMargin + len, kCanary, kMargin);
    std::lock_guard<std::mutex> lock(watch->mutex);
    watch->living.insert(block.get());
    void* data = block->begin() + kMargin;
    return {data, block.release(), &release, at::Device(at::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return next_->raw_deleter(); }

  void copy_data(void* to, const void* from, size_t len) const override {
    default_copy_data(to, from, len);
  }

 private:
  c10::Allocator* next_;
};

// Installs the allocator for good, because its blocks may outlive every watch. It is never
// destroyed.
void install() {
  static const bool installed = [] {
    c10::SetCPUAllocator(new CanaryAllocator(c10::GetCPUAllocator()), /*priority=*/UINT8_MAX);
    return true;
  }();
  (void)installed;
}

}  // namespace

// From now on, this thread's allocations have canaries.
TCH_EXTENSION_API Message tch_extension_canary_begin() {
  return guard([] {
    install();
    watch_of_this_thread = std::make_shared<Watch>();
  });
}

// How many allocations have had canaries overwritten so far, whether or not they have been freed
// since.
TCH_EXTENSION_API size_t tch_extension_canary_overwritten() {
  const std::shared_ptr<Watch> watch = watch_of_this_thread;
  if (watch == nullptr) return 0;
  std::lock_guard<std::mutex> lock(watch->mutex);
  const auto dead = std::count_if(watch->living.begin(), watch->living.end(),
                                  [](auto* block) { return !block->intact(); });
  return watch->broken + static_cast<size_t>(dead);
}

// The same, and stops watching.
TCH_EXTENSION_API size_t tch_extension_canary_end() {
  const size_t overwritten = tch_extension_canary_overwritten();
  watch_of_this_thread = nullptr;
  return overwritten;
}
