// Tensors among the arguments and results of a call, and the call below autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace tch_extension {

// Whether `is_it` holds for a tensor among the values, including those in lists.
template <typename Is>
bool any_tensor(c10::ArrayRef<c10::IValue> values, const Is& is_it) {
  for (const c10::IValue& value : values) {
    if (value.isTensor()) {
      if (value.toTensor().defined() && is_it(value.toTensor())) return true;
    } else if (value.isList()) {
      if (any_tensor(value.toListRef(), is_it)) return true;
    }
  }
  return false;
}

// Calls the operator's kernel for what comes after autograd: a device, or a tracer.
void call_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack& stack);

}  // namespace tch_extension
