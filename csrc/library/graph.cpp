// A call of an operator whose kernel is written in Rust, as part of a graph.

#include "graph.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <memory>
#include <stdexcept>

#include "../ffi.h"
#include "call.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

using c10::IValue;

void call_below_autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack& stack) {
  // The keys include ADInplaceOrView, whose kernel counts the changes of what the operator writes
  // to.
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, &stack);
}

// The results of such a call, before they are part of the graph.
struct GraphResults {
  torch::jit::Stack stack;
};

namespace {

// Calls `visit` with each value of a result that is a tensor, or might be one: None counts.
template <typename Visit>
void for_each_place(torch::jit::Stack& stack, const Visit& visit) {
  for (IValue& value : stack) {
    if (value.isTensorList() ||
        (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList())) {
      auto list = value.toList();
      for (size_t i = 0; i < list.size(); ++i) {
        IValue item = list.get(i);
        if (!item.isTensor() && !item.isNone()) continue;
        visit(item);
        list.set(i, std::move(item));
      }
    } else if (value.isTensor() || value.isNone()) {
      visit(value);
    }
  }
}

size_t count_places(torch::jit::Stack& stack) {
  size_t len = 0;
  for_each_place(stack, [&](const IValue&) { ++len; });
  return len;
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

// Calls the operator below autograd with the same arguments. The caller owns the results.
TCH_EXTENSION_API Message tch_extension_call_below(const KernelFrame* frame,
                                                   GraphResults** results) {
  return guard([&] {
    auto made = std::make_unique<GraphResults>();
    const auto given = torch::jit::last(frame->stack, frame->op.schema().arguments().size());
    made->stack.assign(given.begin(), given.end());
    call_below_autograd(frame->op, frame->keys, made->stack);
    *results = made.release();
  });
}

// The number of tensors among the results. If there is room for all, `tensors` gets a new handle of
// each, in order, or null for one that is absent; the caller owns them.
TCH_EXTENSION_API size_t tch_extension_tensors(GraphResults* results, at::Tensor** tensors,
                                               size_t room) {
  const size_t len = count_places(results->stack);
  if (len > room) return len;
  for_each_place(results->stack, [&](const IValue& value) {
    const bool present = value.isTensor() && value.toTensor().defined();
    *tensors++ = present ? new at::Tensor(value.toTensor()) : nullptr;
  });
  return len;
}

// Puts these tensors in their places; one that is null leaves its place as it is. False if there is
// another number of places; then all are left as they are.
TCH_EXTENSION_API bool tch_extension_replace_tensors(GraphResults* results,
                                                     const at::Tensor* const* tensors, size_t len) {
  if (len != count_places(results->stack)) return false;
  for_each_place(results->stack, [&](IValue& value) {
    const at::Tensor* tensor = *tensors++;
    if (tensor != nullptr) value = *tensor;
  });
  return true;
}

// Ends the call, whose arguments were dropped, with these results, and frees them.
TCH_EXTENSION_API void tch_extension_give_results(KernelFrame* frame, GraphResults* results) {
  const std::unique_ptr<GraphResults> owned(results);
  for (IValue& value : owned->stack) frame->stack.push_back(std::move(value));
}

TCH_EXTENSION_API void tch_extension_free_graph_results(GraphResults* results) { delete results; }

// Keeps the arguments that are no tensors for a backward pass; see tch_extension_keep_arguments.
TCH_EXTENSION_API Message tch_extension_keep_frame(const KernelFrame* frame, Results** result) {
  return guard([&] {
    const auto given = torch::jit::last(frame->stack, frame->op.schema().arguments().size());
    *result = keep_arguments(frame->op.schema(), given.vec()).release();
  });
}
