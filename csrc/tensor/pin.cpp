// Memory that safe Rust reads and writes. It stays allocated as long as a view of it exists,
// whatever happens to its tensors.

#include "pin.h"

#include <ATen/core/Tensor.h>
#include <c10/core/impl/COW.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

// One view. While it lives, it is registered, unless it has no elements.
struct Pin {
  at::Tensor tensor;
  bool writer = false;
  // The operation that this view belongs to. Null for a view of Rust's.
  const void* operation = nullptr;
  // The context of the memory's DataPtr or, if nobody frees that memory, its storage. Null if the
  // view is not registered.
  void* key = nullptr;
  const char* begin = nullptr;
  const char* end = nullptr;
};

}  // namespace tch_extension

using namespace tch_extension;

namespace {

struct Entry {
  // The storage whose deleter must be restored.
  c10::Storage storage;
  // The function that frees the memory; null if nobody frees it.
  c10::DeleterFnPtr deleter = nullptr;
  c10::SmallVector<const Pin*, 2> pins;
  // libtorch has freed the memory (resize_ does this), so the last view must really free it.
  bool orphaned = false;
};

struct Registry {
  std::mutex mutex;
  std::unordered_map<void*, Entry> entries;
};

Registry& registry() {
  // The registry is never destroyed, because static tensors in other files may be freed later.
  static auto* registry = new Registry;
  return *registry;
}

// Replaces the deleter of memory that has a view. It never runs under the lock, because only
// libtorch calls it, and no object of libtorch's is freed under the lock.
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

// Why a tensor cannot be viewed. Rust has the messages.
enum Refusal : int {
  kNone,
  kDevice,
  kLazyValues,
  kNoMemory,
  kLazyClone,
  kViewedForWriting,
  kViewed,
  kInFlight,
};

Refusal refusal(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return kDevice;
  if (tensor.is_neg() || tensor.is_conj()) return kLazyValues;
  if (tensor._is_zerotensor()) return kNoMemory;
  TORCH_CHECK(tensor.has_storage(), "view: a tensor without a storage of its own");
  return kNone;
}

// Finds the bytes that the elements occupy, which must be within the storage. Only for tensors that
// have elements.
void find_span(Pin& pin) {
  int64_t last = pin.tensor.storage_offset();
  for (int64_t dim = 0; dim < pin.tensor.dim(); ++dim) {
    last += (pin.tensor.size(dim) - 1) * pin.tensor.stride(dim);
  }
  const auto itemsize = static_cast<int64_t>(pin.tensor.itemsize());
  const auto* memory = static_cast<const char*>(pin.tensor.storage().data());
  TORCH_CHECK(
      memory != nullptr,
      "view: the tensor has no memory: it is a fake tensor, or its storage was released. A "
      "kernel that a program calls while it is compiled, in the backward pass, too, must be "
      "an operator with a `fake`");
  TORCH_CHECK((last + 1) * itemsize <= int64_t(pin.tensor.storage().nbytes()),
              "view: the tensor reaches beyond its storage");
  pin.begin = memory + pin.tensor.storage_offset() * itemsize;
  pin.end = memory + (last + 1) * itemsize;
}

Refusal conflict(const Entry& entry, const Pin& pin) {
  for (const Pin* other : entry.pins) {
    const bool overlap = pin.begin < other->end && other->begin < pin.end;
    if (!overlap || (!other->writer && !pin.writer)) continue;
    if (other->operation != nullptr && other->operation == pin.operation) continue;
    if (other->operation != nullptr) return kInFlight;
    return other->writer ? kViewedForWriting : kViewed;
  }
  return kNone;
}

// Registers the view. From here on, the memory lives at least as long as the pin.
Refusal enter(Pin& pin) {
  const c10::Storage& storage = pin.tensor.storage();
  c10::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  // Lock before reading the context, because another thread that exchanges deleters takes the
  // context away for a moment.
  std::lock_guard<std::mutex> lock(registry().mutex);
  // The memory of a lazy clone belongs to several storages, any of which may free it.
  if (c10::impl::cow::is_cow_data_ptr(data)) return kLazyClone;
  void* context = data.get_context();
  void* key = context != nullptr ? context : static_cast<void*>(storage.unsafeGetStorageImpl());
  auto [found, is_new] = registry().entries.try_emplace(key);
  Entry& entry = found->second;
  if (const Refusal refused = conflict(entry, pin)) return refused;
  entry.pins.push_back(&pin);
  pin.key = key;
  // Exchange only the deleter, because other threads may be reading the address.
  if (is_new && context != nullptr) {
    entry.deleter = data.get_deleter();
    (void)data.compare_exchange_deleter(entry.deleter, &free_unless_viewed);
  }
  if (!entry.storage) entry.storage = storage;
  return kNone;
}

void leave(const Pin& pin) {
  // Both are released after the lock is.
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
    // In the remaining case the memory has moved to a lazy clone, and freeing it still needs the
    // entry.
    if (entry.orphaned || restored || entry.deleter == nullptr) registry().entries.erase(found);
  }
  if (deleter != nullptr) deleter(pin.key);
}

void bump_version(const at::Tensor& tensor) { tensor.unsafeGetTensorImpl()->bump_version(); }

// Tells autograd that there is a writer. Throws for an inference tensor, which must not be written
// to.
void announce(const Pin& pin) {
  try {
    bump_version(pin.tensor);
  } catch (...) {
    leave(pin);
    throw;
  }
}

// Makes a pin, unless the tensor is refused.
Refusal make(const at::Tensor& tensor, bool writer, void** data, Pin** pin) {
  if (const Refusal refused = refusal(tensor)) return refused;
  auto made = std::make_unique<Pin>();
  made->tensor = tensor;
  made->writer = writer;
  if (tensor.numel() > 0) {
    find_span(*made);
    if (const Refusal refused = enter(*made)) return refused;
    if (writer) announce(*made);
  }
  *data = const_cast<char*>(made->begin);
  *pin = made.release();
  return kNone;
}

}  // namespace

namespace tch_extension {

void Unpin::operator()(Pin* pin) const {
  if (pin->key != nullptr) leave(*pin);
  delete pin;
}

Pinned pin_in_flight(const at::Tensor& tensor, bool writer, const void* operation) {
  if (!tensor.is_cpu() || tensor.numel() == 0) return nullptr;
  // A lazy clone gets memory of its own now, as the operation would see to later.
  tensor.data_ptr();
  Pinned pin(new Pin);
  pin->tensor = tensor;
  pin->writer = writer;
  pin->operation = operation;
  find_span(*pin);
  switch (enter(*pin)) {
    case kNone:
      return pin;
    case kInFlight:
      TORCH_CHECK(false, "another operation in flight uses the tensor; wait for its Work first");
    default:
      TORCH_CHECK(false, "a view of the tensor lives; drop the View or ViewMut first");
  }
}

}  // namespace tch_extension

// Keeps a tensor's memory for a view of `dim` dimensions, which must be the tensor's number of
// dimensions, and returns where its elements are. If `refused` is not zero, `pin` is not written.
TCH_EXTENSION_API Message tch_extension_pin(const at::Tensor* tensor, bool writer, int64_t* sizes,
                                            int64_t* strides, size_t dim, void** data, Pin** pin,
                                            int* refused) {
  return guard([&] {
    TORCH_CHECK(tensor->dim() == int64_t(dim), "view: the tensor's dimensions changed");
    *refused = make(*tensor, writer, data, pin);
    if (*refused != kNone) return;
    std::copy_n(tensor->sizes().begin(), dim, sizes);
    std::copy_n(tensor->strides().begin(), dim, strides);
  });
}

// The same for a contiguous tensor of any number of dimensions, with its number of elements.
TCH_EXTENSION_API Message tch_extension_pin_flat(const at::Tensor* tensor, bool writer, size_t* len,
                                                 void** data, Pin** pin, int* refused) {
  return guard([&] {
    TORCH_CHECK(tensor->is_contiguous(), "view: the tensor is not contiguous");
    *len = static_cast<size_t>(tensor->numel());
    *refused = make(*tensor, writer, data, pin);
  });
}

// Ends a view. Tensors that were saved for a backward pass while the view lived have changed, too,
// so the version counter is bumped once more.
TCH_EXTENSION_API void tch_extension_unpin(Pin* pin) {
  std::unique_ptr<Pin> owned(pin);
  if (owned->key == nullptr) return;
  leave(*owned);
  // An inference tensor has no version counter, and bump_version throws for it.
  free(owned->writer ? guard([&] { bump_version(owned->tensor); }) : nullptr);
}

// The number of memory blocks that have a view.
TCH_EXTENSION_API size_t tch_extension_pinned() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  return registry().entries.size();
}
