// A call of an operator whose kernel is written in Rust. src/ffi/define.rs has the other side.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "value.h"

namespace tch_extension {

// The exception that a kernel's error becomes. src/python/mod.rs mirrors it.
enum class Exception : int32_t { kRuntimeError, kValueError, kIndexError };

// One call, while its kernel runs. Rust reads the arguments where they lie, on the dispatcher's
// stack, and puts the results in their place.
struct KernelFrame {
  const c10::OperatorHandle& op;
  c10::DispatchKeySet keys;
  torch::jit::Stack& stack;
  std::string error{};
  Exception exception = Exception::kRuntimeError;
  // Storage of the lists that an untyped kernel reads.
  std::forward_list<std::vector<Value>> lists{};

  const c10::IValue& argument(size_t index) const {
    return stack[stack.size() - op.schema().arguments().size() + index];
  }
};

// Not 0: the kernel failed, and the frame has the text. `kernel` points to something static,
// because the dispatcher destroys kernels when the process ends, after Rust's own end.
using KernelEntry = int32_t (*)(const void* kernel, KernelFrame* frame);

}  // namespace tch_extension
