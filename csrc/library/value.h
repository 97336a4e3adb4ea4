// The values that Rust and the dispatcher exchange. src/ffi/value.rs mirrors `Value`, as
// `RawValue`.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <cstddef>
#include <cstdint>
#include <forward_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace tch_extension {

enum class Tag : int32_t {
  kDefault,  // for arguments only: the schema's default
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
  kInts,          // `data`: `len` int64_t; for arguments only
  kFloats,        // `data`: `len` double; for arguments only
  kSymInt,        // `data`: c10::SymNodeImpl, of an int that is not known
  kIValues,       // `data`: `len` IValues; for the arguments of a kernel in Rust only
  kWritten,       // `data`: at::Tensor that is written; for functions of TVM FFI only
};

// A `Value` owns nothing: `data` belongs to the side that made it.
struct Value {
  Tag tag;
  union {
    int64_t integer;
    double real;
    const void* data;
  };
  size_t len;
};

// Thrown if a value does not fit an argument. The message describes the value.
struct WrongValue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Describes a value for an error message.
std::string describe(const Value& value);

// Element `index` of a value that is a list.
Value element(const Value& value, size_t index);

// Converts the value to an argument of this type. `type` is the type that the dispatcher's kernels
// see, in which a dtype is an int; `real` is the type that the schema states. If `broadcast` is not
// 0, a single number becomes a list of that length.
c10::IValue to_ivalue(const Value& value, const c10::TypePtr& type, const c10::TypePtr& real,
                      int32_t broadcast);

// What an operator returned (`stack`), and the same as Rust reads it (`values`).
struct Results {
  std::vector<c10::IValue> stack;
  std::vector<Value> values;
  // Storage of the lists that `values` point to.
  std::forward_list<std::vector<Value>> lists;
};

// The symbolic int of a value with the tag kSymInt.
c10::SymInt to_sym_int(const Value& value);

// A value as it lies there, whatever its type in the schema: a Kind is an int, and a list consists
// of IValues. The result borrows from `ivalue`. Its tag is kDefault if Rust cannot read the value.
Value view(const c10::IValue& ivalue) noexcept;

// The arguments of a call without its tensors. They, and values that Rust cannot read, are replaced
// by kDefault.
std::unique_ptr<Results> keep_arguments(const c10::FunctionSchema& schema,
                                        std::vector<c10::IValue> stack);

// The result borrows from `ivalue` and, if it is a list, from `lists`. A value of any type is read
// as it is.
Value from_ivalue(const c10::IValue& ivalue, const c10::Type& real,
                  std::forward_list<std::vector<Value>>& lists);

}  // namespace tch_extension
