#include "touched.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/ivalue.h>

#include <mutex>

namespace tch_extension {

std::atomic<bool> touches_are_noted{false};

namespace {

// The recording that is under way, or null. Read and written under the mutex.
Touched* current = nullptr;

// Held while a recording is used. Never destroyed, because the engine's threads may outlive static
// objects. No tensor is released under it.
std::mutex& mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// How many objects keep a storage. Read and written under the mutex, and never destroyed, as it.
std::unordered_map<const c10::StorageImpl*, size_t>& keepers() {
  static auto* keepers = new std::unordered_map<const c10::StorageImpl*, size_t>;
  return *keepers;
}

// Runs `body` with the recording that is under way. libtorch would only log an exception of a
// callback.
template <typename Body>
void with_current(Body&& body, bool Touched::* has_failed) noexcept {
  const std::lock_guard<std::mutex> lock(mutex());
  if (current == nullptr) return;
  try {
    body(*current);
  } catch (...) {
    current->*has_failed = true;
  }
}

}  // namespace

std::unique_ptr<at::ObserverContext> note_inputs(const at::RecordFunction& operation);

Touched::~Touched() {
  const std::lock_guard<std::mutex> lock(mutex());
  for (const auto& entry : kept_) {
    const auto count = keepers().find(entry.first);
    if (--count->second == 0) keepers().erase(count);
  }
}

void Touched::start() {
  const std::lock_guard<std::mutex> lock(mutex());
  TORCH_CHECK(current == nullptr, "internal error: two recordings of what is touched");
  using at::RecordScope;
  // A global one, because other threads may launch work on a stream that is being captured.
  handle_ =
      at::addGlobalCallback(at::RecordFunctionCallback(note_inputs)
                                .needsInputs(true)
                                .scopes({RecordScope::FUNCTION, RecordScope::BACKWARD_FUNCTION}));
  current = this;
  touches_are_noted = true;
}

void Touched::stop() noexcept {
  if (!handle_) return;
  {
    const std::lock_guard<std::mutex> lock(mutex());
    touches_are_noted = false;
    current = nullptr;
  }
  at::removeCallback(*handle_);
  handle_.reset();
}

void Touched::keep(const c10::Storage& storage) {
  const void* data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  if (data == nullptr || kept_.count(storage.unsafeGetStorageImpl()) != 0 ||
      is_own(storage.device(), data)) {
    return;
  }
  size_t& count = keepers()[storage.unsafeGetStorageImpl()];
  kept_.emplace(storage.unsafeGetStorageImpl(), Kept{storage, data, storage.nbytes(), false});
  ++count;
}

void Touched::keep(const at::Tensor& tensor) {
  // A number that an operation gets as a tensor of its own.
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return;
  if (tensor.has_storage()) {
    keep(tensor.storage());
  } else if (tensor.layout() == at::kSparse) {
    const auto* sparse = static_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    for (const at::Tensor& part : {sparse->indices(), sparse->values()}) keep(part);
  } else if (tensor.unsafeGetTensorImpl()->is_sparse_compressed()) {
    const auto* sparse = static_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
    for (const at::Tensor& part :
         {sparse->compressed_indices(), sparse->plain_indices(), sparse->values()}) {
      keep(part);
    }
  }
}

bool Touched::is_intact() const {
  for (const auto& [impl, kept] : kept_) {
    const void* data = kept.storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
    if (data != kept.data || impl->nbytes() < kept.bytes) return false;
  }
  return true;
}

bool Touched::is_left() {
  const std::lock_guard<std::mutex> lock(mutex());
  bool is_left = false;
  for (auto& [impl, kept] : kept_) {
    const bool has_others = kept.storage.use_count() > keepers().at(impl);
    if (!knows_others_) kept.has_others = has_others;
    is_left = is_left || (kept.has_others && !has_others);
  }
  knows_others_ = true;
  return is_left;
}

void Touched::check() const {
  TORCH_CHECK(!has_failed_, "internal error: the tensors that it uses could not be noted");
}

void note(const at::Tensor* tensors, size_t len) noexcept {
  with_current(
      [&](Touched& touched) {
        bool is_captured = false;
        for (size_t i = 0; i < len && !is_captured; ++i) {
          is_captured = tensors[i].defined() && touched.is_captured(tensors[i].device());
        }
        for (size_t i = 0; i < len && is_captured; ++i) touched.keep(tensors[i]);
      },
      &Touched::has_failed_);
}

void note(c10::Device device, const std::shared_ptr<const void>& owner) noexcept {
  with_current(
      [&](Touched& touched) {
        if (touched.is_captured(device)) touched.owners_.push_back(owner);
      },
      &Touched::has_failed_);
}

std::unique_ptr<at::ObserverContext> note_inputs(const at::RecordFunction& operation) {
  std::vector<at::Tensor> tensors;
  with_current(
      [&](Touched&) {
        for (const c10::IValue& input : operation.inputs()) {
          input.visit([&](const c10::IValue& value) {
            if (value.isTensor() && value.toTensor().defined()) tensors.push_back(value.toTensor());
            return value.isTensor() || value.isObject() || value.isPyObject();
          });
        }
      },
      &Touched::has_failed_);
  note(tensors.data(), tensors.size());
  return nullptr;
}

}  // namespace tch_extension
