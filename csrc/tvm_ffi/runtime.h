// libtvm_ffi, which a process loads at most once, and only if it uses TVM FFI.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <string>
#include <utility>

#include "abi.h"

namespace tch_extension::tvm_ffi {

// Functions of libtvm_ffi, and functions that it registers by name.
struct Runtime {
  int (*dec_ref)(void* object);
  int (*get_global)(const Bytes* name, void** function);
  int (*call)(void* function, const Any* arguments, int32_t len, Any* result);
  void (*take_error)(void** error);
  int (*make_string)(const Bytes* text, Any* result);
  int (*set_stream)(int32_t device_type, int32_t device, void* stream, void** before);
  int (*set_allocator)(Allocator allocator, int for_all_threads, Allocator* before);
  Allocator (*allocator)();
  int (*to_dlpack)(void* tensor, DLManagedTensorVersioned** result);

  Object *load_module, *get_function, *get_metadata;
  Object *make_array, *array_size, *array_item;
  Object *list_size, *list_item;  // null in versions without lists
};

// Throws if libtvm_ffi is not attached.
const Runtime& runtime();

// The error that a function of TVM FFI reported on this thread.
std::string take_error(const Runtime& ffi);

// An owned value.
class Owned {
 public:
  Owned() = default;
  explicit Owned(const Any& any) : any_(any) {}
  Owned(Owned&& other) noexcept : any_(std::exchange(other.any_, Any{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(any_, other.any_);
    return *this;
  }
  ~Owned() {
    if (any_.type_index >= kStaticObjectBegin) runtime().dec_ref(any_.object);
  }
  const Any& get() const { return any_; }
  Any* room() { return &any_; }
  Object* release() { return std::exchange(any_, Any{}).object; }

 private:
  Any any_;
};

// Calls a function, and throws the error that it reports.
Owned call(const Runtime& ffi, Object* function, const Any* arguments, size_t len);

inline Any any_of(Object* object) {
  Any any;
  any.type_index = object->type_index;
  any.object = object;
  return any;
}

inline Any any_of(int64_t integer) {
  Any any;
  any.type_index = kInt;
  any.integer = integer;
  return any;
}

// A string. It holds a copy of the text.
Owned any_of_text(const Runtime& ffi, const char* text, size_t len);

// The text of a value that is a string.
std::string text_of(const Any& any);

// While it lives, it notes what functions allocate on this thread, without keeping it. A function
// that returns such a tensor then returns the very tensor, and not a view that DLPack makes.
class Allocations {
 public:
  Allocations();
  Allocations(const Allocations&) = delete;
  Allocations& operator=(const Allocations&) = delete;
  ~Allocations();

  void note(const at::Tensor& tensor) {
    made_.push_back({tensor.sizes().data(), c10::weak_intrusive_ptr(tensor.getIntrusivePtr())});
  }

  // The tensor whose object this view is, or an undefined one. Views that a function makes of it
  // have sizes of their own.
  at::Tensor find(const DLTensor& view) const {
    for (const Made& made : made_) {
      auto tensor = made.sizes == view.shape ? made.tensor.lock() : nullptr;
      if (tensor) return at::Tensor(std::move(tensor));
    }
    return {};
  }

 private:
  struct Made {
    const int64_t* sizes;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  };
  Allocations* outer_;
  c10::SmallVector<Made, 2> made_;
};

// The allocator for tensors that functions return: libtorch's.
int allocate(DLTensor* prototype, DLManagedTensorVersioned** result, void* context,
             void (*fail)(void*, const char*, const char*)) noexcept;

}  // namespace tch_extension::tvm_ffi
