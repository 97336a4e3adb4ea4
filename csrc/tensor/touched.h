// The memory that work uses by address and that must live as long as this work can run again: what
// the operations in a CUDA graph read and write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

namespace tch_extension {

// Keeps the memory of the tensors that captured operations get, in whichever thread they run. A
// recording hears of them in two ways: libtorch reports the inputs of its operations, of its
// backward nodes and of our functions as to a profiler; and whoever passes an address to a kernel
// without an operation calls `touch`.
class Touched {
 public:
  Touched() = default;
  Touched(const Touched&) = delete;
  Touched& operator=(const Touched&) = delete;

  // Begins and ends the recording, which must have ended when the object is destroyed. There can be
  // one at a time.
  void start();
  void stop() noexcept;

  // Whether all memory is where it was, and as large. A tensor's memory may be exchanged below its
  // handles, by resize_ for example, which frees the former one.
  bool is_intact() const;

  // Whether memory that others held when this was first called is held by nobody else any more. An
  // object of this class is no other.
  bool is_left();

  // The storages. Nobody records any more.
  template <typename See>
  void for_each_storage(See see) const {
    for (const auto& entry : kept_) see(entry.second.storage);
  }

  // Throws if something could not be noted.
  void check() const;

 protected:
  ~Touched();
  // Whether what runs on this device now, in this thread, is to be recorded.
  virtual bool is_captured(c10::Device device) = 0;
  // Whether the memory needs no keeping, because it lives as long anyway.
  virtual bool is_own(c10::Device device, const void* address) = 0;

 private:
  struct Kept {
    c10::Storage storage;
    const void* data;
    size_t bytes;
    bool has_others;
  };

  friend void note(const at::Tensor* tensors, size_t len) noexcept;
  friend void note(c10::Device device, const std::shared_ptr<const void>& owner) noexcept;
  friend std::unique_ptr<at::ObserverContext> note_inputs(const at::RecordFunction& operation);

  void keep(const at::Tensor& tensor);
  void keep(const c10::Storage& storage);

  std::unordered_map<const c10::StorageImpl*, Kept> kept_;
  std::vector<std::shared_ptr<const void>> owners_;
  std::optional<at::CallbackHandle> handle_;
  bool has_failed_ = false;
  bool knows_others_ = false;
};

// Whether a recording is under way.
extern std::atomic<bool> touches_are_noted;

// The slow parts of the functions below.
void note(const at::Tensor* tensors, size_t len) noexcept;
void note(c10::Device device, const std::shared_ptr<const void>& owner) noexcept;

// A kernel is about to get the address of this tensor's memory.
inline void touch(const at::Tensor& tensor) {
  if (C10_UNLIKELY(touches_are_noted.load(std::memory_order_relaxed))) note(&tensor, 1);
}

// Kernels on this device are about to get addresses of memory that belongs to `owner`.
inline void touch(c10::Device device, const std::shared_ptr<const void>& owner) {
  if (C10_UNLIKELY(touches_are_noted.load(std::memory_order_relaxed))) note(device, owner);
}

}  // namespace tch_extension
