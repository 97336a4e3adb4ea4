// The functions through which Rust runs an autograd::Function: they begin and end a forward pass,
// attach a node to its outputs, and answer the backward pass's questions about that node.

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "../ffi.h"
#include "bridge.h"
#include "function_node.h"
#include "levels.h"
#include "lists.h"
#include "state.h"
#include "wrap.h"

using namespace tch_extension;

TCH_EXTENSION_API bool tch_extension_requires_grad(const at::Tensor* tensor) {
  return tensor->defined() && tensor->requires_grad();
}

TCH_EXTENSION_API bool tch_extension_defined(const at::Tensor* tensor) { return tensor->defined(); }

struct tch_extension::ForwardMode {
  at::RecordFunction* record;    // null when no profiler runs
  c10::AutogradState* autograd;  // the state of this thread
  bool grad_mode_before;
  bool needs_graph;
  bool anomaly_mode;
  bool has_forward_gradient;  // an input has one; the forward pass would lose it
  uint64_t excluded;          // dispatch keys that the forward pass excludes and its caller did not
};

namespace {

// These are plain loops because std::any_of is unrolled for long lists, which costs more than it
// saves for so few tensors.
bool any_requires_grad(const at::Tensor* const* tensors, size_t len) {
  for (size_t i = 0; i < len; ++i) {
    if (is_present(tensors[i]) && tensors[i]->requires_grad()) return true;
  }
  return false;
}

bool any_has_forward_gradient(const at::Tensor* const* tensors, size_t len) {
  for (size_t i = 0; i < len; ++i) {
    if (is_present(tensors[i]) && has_forward_gradient(*tensors[i])) return true;
  }
  return false;
}

bool is_among(const at::Tensor& tensor, const at::Tensor* const* tensors, size_t len) {
  for (size_t i = 0; i < len; ++i) {
    if (tensors[i] != nullptr && tensors[i]->is_same(tensor)) return true;
  }
  return false;
}

// Records the forward pass for torch's profiler and NVTX. The engine records the backward pass
// itself, under the node's name and sequence number.
at::RecordFunction* start_record(at::StepCallbacks&& callbacks, std::string_view name,
                                 const at::Tensor* const* inputs, size_t len,
                                 bool needs_graph) noexcept {
  try {
    auto record = std::make_unique<at::RecordFunction>(std::move(callbacks));
    // The node will get this sequence number. A profiler uses it to match the backward pass with
    // this forward pass.
    const int64_t sequence_nr =
        needs_graph ? static_cast<int64_t>(at::sequence_number::peek()) : -1;
    if (record->needsInputs()) {
      std::vector<c10::IValue> values;
      for (size_t i = 0; i < len; ++i)
        values.emplace_back(is_present(inputs[i]) ? *inputs[i] : at::Tensor());
      record->before(name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()),
                     sequence_nr);
    } else {
      record->before(name, sequence_nr);
    }
    return record.release();
  } catch (...) {
    return nullptr;  // a failing profiler must not make the operator fail
  }
}

}  // namespace

// Begins a forward pass, during which no graph is recorded: grad mode is off, or, within a
// transform of torch.func, the operations are below autograd. The pass needs a graph if one was
// recorded before and an input requires grad. That is decided here, once, whatever the forward pass
// does to its inputs. With `without_autocast`, autocast casts nothing until the pass ends.
TCH_EXTENSION_API ForwardMode tch_extension_begin_forward(const char* name, size_t name_len,
                                                          const at::Tensor* const* inputs,
                                                          size_t len, bool without_autocast) {
  // The state is looked up once, because each call of at::GradMode would look it up again.
  auto& autograd = c10::AutogradState::get_tls_state();
  const bool before = autograd.get_grad_mode();
  auto keys = c10::impl::tls_local_dispatch_key_set();
  const bool needs_graph = before && !is_below_autograd(keys) && any_requires_grad(inputs, len);
  ForwardMode mode{};
  mode.autograd = &autograd;
  mode.grad_mode_before = before;
  mode.needs_graph = needs_graph;
  mode.anomaly_mode = torch::autograd::AnomalyMode::is_enabled();
  mode.has_forward_gradient = any_has_forward_gradient(inputs, len);
  c10::DispatchKeySet excluded;
  if (without_autocast) excluded = c10::autocast_dispatch_keyset;
  const Level where = level(keys);
  if (C10_LIKELY(where == Level::kOnly)) {
    autograd.set_grad_mode(false);
  } else if (where == Level::kWithin) {
    excluded = excluded | c10::autograd_dispatch_keyset;
  }
  // Outside a region the keys of autocast are excluded already.
  excluded = excluded - keys.excluded_;
  if (C10_UNLIKELY(!excluded.empty())) {
    mode.excluded = excluded.raw_repr();
    keys.excluded_ = keys.excluded_ | excluded;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  if (C10_UNLIKELY(callbacks.has_value())) {
    mode.record = start_record(std::move(*callbacks), {name, name_len}, inputs, len, needs_graph);
  }
  return mode;
}

// Called before input `index` is changed in place. It is an error if the graph cannot represent
// that change.
TCH_EXTENSION_API Message tch_extension_check_in_place(const at::Tensor* const* inputs, size_t len,
                                                       size_t index) {
  return guard([&] {
    if (!is_present(inputs[index])) return;
    const auto* first = std::find_if(inputs, inputs + len,
                                     [](const at::Tensor* input) { return is_present(input); });
    check_in_place(*inputs[index], **first);
  });
}

// Restores grad mode to its previous value, whatever the forward pass set it to, and ends what
// begin_forward excluded.
TCH_EXTENSION_API void tch_extension_end_forward(const ForwardMode* mode) {
  mode->autograd->set_grad_mode(mode->grad_mode_before);
  if (C10_UNLIKELY(mode->excluded != 0)) {
    auto keys = c10::impl::tls_local_dispatch_key_set();
    keys.excluded_ = keys.excluded_ - c10::DispatchKeySet::from_raw_repr(mode->excluded);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  delete mode->record;
}

// Whether operations become part of the graph.
TCH_EXTENSION_API bool tch_extension_grad_mode() { return records_graph(); }

// Returns the previous mode.
TCH_EXTENSION_API bool tch_extension_set_grad_mode(bool enabled) {
  const bool before = at::GradMode::is_enabled();
  at::GradMode::set_enabled(enabled);
  return before;
}

// Whether the outputs of a forward pass without a graph can be returned unchanged: none is an
// input, none has a graph of its own, and none is undefined.
TCH_EXTENSION_API bool tch_extension_are_constants(const at::Tensor* const* inputs,
                                                   size_t inputs_len,
                                                   const at::Tensor* const* outputs,
                                                   size_t outputs_len) {
  for (size_t i = 0; i < outputs_len; ++i) {
    const at::Tensor* output = outputs[i];
    if (output == nullptr) continue;
    if (!output->defined() || output->requires_grad() || is_among(*output, inputs, inputs_len))
      return false;
  }
  return true;
}

// Attaches a node to the outputs of a forward pass that has run. Takes ownership of `state` even on
// failure. `wrapped` has room for params->outputs_len pointers; on success the caller owns them,
// and on failure they are not written.
TCH_EXTENSION_API Message tch_extension_apply(const ApplyParams* params, void* state,
                                              const FunctionVTable* vtable, at::Tensor** wrapped) {
  State owned(state, vtable);  // first, so that the state is dropped if anything below throws
  return guard([&] {
    Present present;
    for (size_t i = 0; i < params->inputs_len; ++i) {
      if (is_present(params->inputs[i])) present.push_back(params->inputs[i]);
    }
    NodePtr<FunctionNode> node;
    if (params->needs_graph) {
      check_dirty_views(*params, present);
      node = make_node<FunctionNode>(std::move(owned), *params);
      node->set_inputs(*params, present);
    }
    const bool is_plain = node && all_are_new(*params, present);
    auto outputs = is_plain ? hang_on(*params, node) : wrap_outputs(*params, present, node);
    if (node) {
      if (!is_plain && params->materialize_grads) node->set_outputs(outputs);
      node->set_saved(save(*params, present, outputs, node.get()));
    }
    release_to(wrapped, std::move(outputs));
  });
}

// A saved tensor, after a check that it was not changed since it was saved. Null if it was absent.
TCH_EXTENSION_API Message tch_extension_saved(const FunctionNode* node, size_t slot,
                                              at::Tensor** tensor) {
  return guard([&] {
    at::Tensor saved = node->unpack(slot);
    *tensor = saved.defined() ? std::make_unique<at::Tensor>(std::move(saved)).release() : nullptr;
  });
}

TCH_EXTENSION_API bool tch_extension_needs_input_grad(const FunctionNode* node, size_t input) {
  return node->needs_input_grad(input);
}

// Whether the operations of the node's backward pass become part of the graph.
TCH_EXTENSION_API bool tch_extension_creates_graph(const FunctionNode* node) {
  return node->creates_graph();
}

TCH_EXTENSION_API bool tch_extension_is_last_backward(const BackwardResults* results) {
  return results->is_last;
}

// The incoming gradients that nobody else holds: one bit for each of the first 64.
TCH_EXTENSION_API uint64_t tch_extension_owned_gradients(const BackwardResults* results) {
  return results->owned;
}

// Takes ownership of `grad`.
TCH_EXTENSION_API void tch_extension_give_gradient(BackwardResults* results, size_t input,
                                                   at::Tensor* grad) {
  const std::unique_ptr<at::Tensor> owned(grad);
  if (input < results->gradients.size()) results->gradients[input] = std::move(*owned);
}

// Declares that the gradient of this input does not depend on the incoming gradients.
TCH_EXTENSION_API void tch_extension_mark_constant(BackwardResults* results, size_t input) {
  results->constants.push_back(input);
}

TCH_EXTENSION_API void tch_extension_set_backward_error(BackwardResults* results, const char* text,
                                                        size_t len) {
  results->error.assign(text, len);
}

// The number of nodes of this bridge that are alive now. Tests use it to find leaks.
TCH_EXTENSION_API int64_t tch_extension_live_nodes() { return FunctionNode::live(); }

TCH_EXTENSION_API void tch_extension_free_message(char* message) { std::free(message); }
