// Memory that safe Rust looks at: it stays allocated while somebody looks, whatever happens to its
// tensors.

#include <ATen/ATen.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tch_extension/c_abi.h"

using namespace tch_extension;

namespace {

// One view. It is registered while it lives, unless it has no elements.
struct Pin {
  at::Tensor tensor;
  bool writer = false;
  // The context of the memory's DataPtr, or its storage if nobody frees that memory. Null: not
  // registered.
  void* key = nullptr;
  const char* begin = nullptr;
  const char* end = nullptr;
};

struct Entry {
  // The storage whose deleter is to be put back.
  c10::Storage storage;
  // What frees the memory; null when nobody does.
  c10::DeleterFnPtr deleter = nullptr;
  std::vector<const Pin*> pins;
  // libtorch freed the memory (resize_ does), and the last view has to do it.
  bool orphaned = false;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, Entry> entries;
};

Registry& registry() {
  // Never destroyed: tensors in statics of other units may be freed later.
  static auto* registry = new Registry;
  return *registry;
}

// In the place of the deleter of memory that is looked at. It never runs under the lock, because
// only libtorch calls it, and nothing of libtorch's is freed under the lock.
void free_unless_viewed(void* context) {
  c10::DeleterFnPtr deleter = nullptr;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = registry().entries.find(context);
    if (found == registry().entries.end()) return;
    if (!found->second.pins.empty()) {
      found->second.orphaned = true;
      return;
    }
    deleter = found->second.deleter;
    registry().entries.erase(found);
  }
  deleter(context);
}

// Why a tensor cannot be viewed. Rust has the words.
enum Refusal : int {
  kNone,
  kDevice,
  kLazyValues,
  kNoMemory,
  kLazyClone,
  kViewedForWriting,
  kViewed,
};

Refusal refusal(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return kDevice;
  if (tensor.is_neg() || tensor.is_conj()) return kLazyValues;
  if (tensor._is_zerotensor()) return kNoMemory;
  TORCH_CHECK(tensor.has_storage(), "view: a tensor without a storage of its own");
  return kNone;
}

// The bytes that the elements lie in, which must be within the storage. Only for tensors with
// elements.
void find_span(Pin& pin) {
  int64_t last = pin.tensor.storage_offset();
  for (int64_t dim = 0; dim < pin.tensor.dim(); ++dim) {
    last += (pin.tensor.size(dim) - 1) * pin.tensor.stride(dim);
  }
  const auto itemsize = static_cast<int64_t>(pin.tensor.itemsize());
  const auto* memory = static_cast<const char*>(pin.tensor.storage().data());
  TORCH_CHECK(memory != nullptr && (last + 1) * itemsize <= int64_t(pin.tensor.storage().nbytes()),
              "view: the tensor reaches beyond its storage");
  pin.begin = memory + pin.tensor.storage_offset() * itemsize;
  pin.end = memory + (last + 1) * itemsize;
}

Refusal conflict(const Entry& entry, const Pin& pin) {
  for (const Pin* other : entry.pins) {
    const bool overlap = pin.begin < other->end && other->begin < pin.end;
    if (overlap && other->writer) return kViewedForWriting;
    if (overlap && pin.writer) return kViewed;
  }
  return kNone;
}

// From now on the memory outlives the pin.
Refusal enter(Pin& pin) {
  const c10::Storage& storage = pin.tensor.storage();
  c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  // From here on, because an exchange of deleters, by another thread, takes the context away for a
  // moment.
  std::lock_guard<std::mutex> lock(registry().mutex);
  // Its memory belongs to several storages, each of which may be the one to free it.
  if (c10::impl::cow::is_cow_data_ptr(data)) return kLazyClone;
  void* context = data.get_context();
  void* key = context != nullptr ? context : static_cast<void*>(storage.unsafeGetStorageImpl());
  auto [found, is_new] = registry().entries.try_emplace(key);
  Entry& entry = found->second;
  if (const Refusal refused = conflict(entry, pin)) return refused;
  entry.pins.push_back(&pin);
  pin.key = key;
  // Only the deleter is exchanged: other threads may be reading the address.
  if (is_new && context != nullptr) {
    entry.deleter = data.get_deleter();
    (void)data.compare_exchange_deleter(entry.deleter, &free_unless_viewed);
  }
  if (!entry.storage) entry.storage = storage;
  return kNone;
}

void leave(const Pin& pin) {
  // Both are let go when the lock is.
  c10::Storage storage;
  c10::DeleterFnPtr deleter = nullptr;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    auto found = registry().entries.find(pin.key);
    Entry& entry = found->second;
    entry.pins.erase(std::find(entry.pins.begin(), entry.pins.end(), &pin));
    if (!entry.pins.empty()) return;
    std::swap(storage, entry.storage);
    c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
    if (entry.orphaned) deleter = entry.deleter;
    const bool restored = data.get_context() == pin.key &&
                          data.compare_exchange_deleter(&free_unless_viewed, entry.deleter);
    // Otherwise the memory moved to a lazy clone, and freeing it still needs the entry.
    if (entry.orphaned || restored || entry.deleter == nullptr) registry().entries.erase(found);
  }
  if (deleter != nullptr) deleter(pin.key);
}

void bump_version(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

// To autograd, that a writer came. Throws for an inference tensor, which must not be written to.
void announce(const Pin& pin) {
  try {
    bump_version(pin.tensor);
  } catch (...) {
    leave(pin);
    throw;
  }
}

}  // namespace

// Keeps a tensor's memory for a view of `dim` dimensions, as many as the tensor has, and says where
// its elements are. A refusal that is not zero leaves `pin` alone.
TCH_EXTENSION_API Message tch_extension_pin(const at::Tensor* tensor, bool writer, int64_t* sizes,
                                            int64_t* strides, size_t dim, void** data, Pin** pin,
                                            int* refused) {
  return guard([&] {
    TORCH_CHECK(tensor->dim() == int64_t(dim), "view: the tensor's dimensions changed");
    *refused = refusal(*tensor);
    if (*refused != kNone) return;
    auto made = std::make_unique<Pin>();
    made->tensor = *tensor;
    made->writer = writer;
    if (tensor->numel() > 0) {
      find_span(*made);
      *refused = enter(*made);
      if (*refused != kNone) return;
      if (writer) announce(*made);
    }
    std::copy_n(tensor->sizes().begin(), dim, sizes);
    std::copy_n(tensor->strides().begin(), dim, strides);
    *data = const_cast<char*>(made->begin);
    *pin = made.release();
  });
}

// Ends a view. What was saved for a backward while it lived has changed, too: the version goes up
// once more.
TCH_EXTENSION_API void tch_extension_unpin(Pin* pin) {
  std::unique_ptr<Pin> owned(pin);
  if (owned->key == nullptr) return;
  leave(*owned);
  // An inference tensor has no versions, and says so by throwing.
  free(owned->writer ? guard([&] { bump_version(owned->tensor); }) : nullptr);
}

// How many memories are looked at.
TCH_EXTENSION_API size_t tch_extension_pinned() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().entries.size();
}
