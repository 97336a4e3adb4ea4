// The arguments and results of a kernel that is written in Rust.

#include <memory>

#include "../ffi.h"
#include "call.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

TCH_EXTENSION_API size_t tch_extension_arguments_len(const KernelFrame* frame) {
  return frame->op.schema().arguments().size();
}

// The argument as it lies on the stack. It lives until the results are given.
TCH_EXTENSION_API void tch_extension_argument(const KernelFrame* frame, size_t index,
                                              Value* value) {
  *value = view(frame->argument(index));
}

// The argument's name, which lives as long as the operator.
TCH_EXTENSION_API const char* tch_extension_argument_name(const KernelFrame* frame, size_t index) {
  return frame->op.schema().arguments()[index].name().c_str();
}

// The argument's type in the schema, as arguments_text has it. The caller frees it like a message.
TCH_EXTENSION_API char* tch_extension_argument_type(const KernelFrame* frame, size_t index) {
  return strdup(frame->op.schema().arguments()[index].real_type()->str().c_str());
}

// Element `index` of a value with the tag kIValues.
TCH_EXTENSION_API void tch_extension_element(const Value* list, size_t index, Value* value) {
  *value = view(static_cast<const c10::IValue*>(list->data)[index]);
}

// All arguments by their types in the schema. They live until the results are given.
TCH_EXTENSION_API Message tch_extension_all_arguments(KernelFrame* frame, Value* values) {
  return guard([&] {
    const auto& declared = frame->op.schema().arguments();
    for (size_t i = 0; i < declared.size(); ++i)
      values[i] = from_ivalue(frame->argument(i), *declared[i].real_type(), frame->lists);
  });
}

// Removes the arguments, whose places the results take.
TCH_EXTENSION_API void tch_extension_drop_arguments(KernelFrame* frame) {
  torch::jit::drop(frame->stack, frame->op.schema().arguments().size());
}

// Takes ownership of the tensor. Null is None.
TCH_EXTENSION_API void tch_extension_give_tensor(KernelFrame* frame, at::Tensor* tensor) {
  if (tensor == nullptr) {
    frame->stack.emplace_back();
    return;
  }
  frame->stack.emplace_back(std::move(*tensor));
  delete tensor;
}

// Takes ownership of the tensors.
TCH_EXTENSION_API void tch_extension_give_tensors(KernelFrame* frame, at::Tensor* const* tensors,
                                                  size_t len) {
  c10::List<at::Tensor> list;
  list.reserve(len);
  for (size_t i = 0; i < len; ++i) {
    list.push_back(std::move(*tensors[i]));
    delete tensors[i];
  }
  frame->stack.emplace_back(std::move(list));
}

// Gives result `index`, and converts it to its type in the schema.
TCH_EXTENSION_API Message tch_extension_give(KernelFrame* frame, size_t index, const Value* value) {
  return guard([&] {
    const auto& wanted = frame->op.schema().returns().at(index);
    try {
      frame->stack.push_back(to_ivalue(*value, wanted.type(), wanted.real_type(), 0));
    } catch (const WrongValue& wrong) {
      throw std::runtime_error("its kernel returned " + std::string(wrong.what()) + " for result " +
                               std::to_string(index) + ", which is " + wanted.real_type()->str());
    }
  });
}

TCH_EXTENSION_API size_t tch_extension_results_len(const KernelFrame* frame) {
  return frame->op.schema().returns().size();
}
