// Values on their way between Rust and the dispatcher. src/ffi/library.rs mirrors `Value`.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <cstddef>
#include <cstdint>
#include <forward_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace tch_extension {

enum class Tag : int32_t {
  kDefault,  // of an argument only: the schema's default
  kNone,
  kTensor,        // `data`: at::Tensor
  kInt,           // `integer`
  kFloat,         // `real`
  kBool,          // `integer`
  kString,        // `data`: `len` bytes of UTF-8
  kDevice,        // `integer`: the index, or -1; `len`: c10::DeviceType
  kScalarType,    // `integer`
  kLayout,        // `integer`
  kMemoryFormat,  // `integer`
  kList,          // `data`: `len` Values
  kInts,          // `data`: `len` int64_t; of an argument only
  kFloats,        // `data`: `len` double; of an argument only
};

// Owns nothing: `data` belongs to whoever made the value.
struct Value {
  Tag tag;
  union {
    int64_t integer;
    double real;
    const void* data;
  };
  size_t len;
};

// What an argument is not; the message is what came instead.
struct WrongValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value as an argument of this type. `type` is what the dispatcher's kernels see, where a kind
// is an int; `real` is what the schema says. `broadcast`: the length that a list has if a single
// number is given, or 0.
c10::IValue to_ivalue(const Value& value, const c10::TypePtr& type, const c10::TypePtr& real,
                      int32_t broadcast);

// What an operator returned, and what of it Rust reads.
struct Results {
  std::vector<c10::IValue> stack;
  std::vector<Value> values;
  // Of lists in `values`: they point into here.
  std::forward_list<std::vector<Value>> lists;
};

// Borrowed from `ivalue`, and from `lists` as far as it is a list.
Value from_ivalue(const c10::IValue& ivalue, const c10::Type& real,
                  std::forward_list<std::vector<Value>>& lists);

}  // namespace tch_extension
