// The part of TVM FFI's C ABI that a caller needs, as tvm/ffi/c_api.h and extra/c_env_api.h of the
// wheel apache-tvm-ffi declare it. This copy lets the crate compile without those headers.
#pragma once

#include <ATen/dlpack.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tch_extension::tvm_ffi {

// Values from 64 on are pointers to objects with reference counts.
enum TypeIndex : int32_t {
  kNone = 0,
  kInt = 1,
  kBool = 2,
  kFloat = 3,
  kDataType = 5,
  kDevice = 6,
  kSmallStr = 11,
  kStaticObjectBegin = 64,
  kStr = 65,
  kFunction = 68,
  kShape = 69,
  kTensor = 70,
  kArray = 71,
  kModule = 73,
  kList = 75,
};

// The head of every object. What follows depends on the type: a Tensor has a DLTensor, a Str has
// Bytes, a Shape has a ShapeCell, an Error has an ErrorCell.
struct Object {
  std::atomic<uint64_t> counts;  // strong references in the lower half, weak ones in the upper
  int32_t type_index;
  uint32_t padding;
  void (*deleter)(void* self, int flags);
};

// The flags of a deleter: the last strong reference is gone, so it destroys the content; the last
// weak reference is gone, so it frees the memory.
constexpr int kDeleterStrong = 1, kDeleterWeak = 2;
constexpr uint64_t kOneReference = (uint64_t{1} << 32) | 1;

struct Any {
  int32_t type_index = kNone;
  uint32_t small_len = 0;  // of a small string; otherwise 0
  union {
    int64_t integer = 0;
    double real;
    Object* object;
    DLDataType dtype;
    DLDevice device;
    char text[8];
  };
};

struct Bytes {
  const char* data;
  size_t size;
};

struct ShapeCell {
  const int64_t* data;
  size_t size;
};

struct ErrorCell {
  Bytes kind, message, backtrace;
};

static_assert(sizeof(Object) == 24 && sizeof(Any) == 16 && sizeof(DLTensor) == 48);

// What follows an object's head.
template <typename Cell>
const Cell& cell(const Object& object) {
  return *reinterpret_cast<const Cell*>(&object + 1);
}

// Makes a tensor like the prototype. On failure it calls the last function with the kind and the
// text of the error.
using Allocator = int (*)(DLTensor* prototype, DLManagedTensorVersioned** result, void* context,
                          void (*fail)(void*, const char* kind, const char* text));

}  // namespace tch_extension::tvm_ffi
