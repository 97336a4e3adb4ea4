// The one bridge to torch::autograd: a graph node whose backward is a Rust function.
//
// torch::autograd::Function<T> is not used: it cannot take absent tensors, gives every operator the same
// name and would hide the Rust state in an IValue.

#include <ATen/core/grad_mode.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bridge.h"
#include "state.h"

namespace tch_extension {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;

namespace {

std::atomic<int64_t> live_nodes{0};

bool is_present(const at::Tensor* tensor) { return tensor != nullptr && tensor->defined(); }

// Of the inputs that are present. They outlive the call.
using Present = c10::SmallVector<const at::Tensor*, 8>;

struct Saved {
  SavedVariable variable;
  // Neither an input nor an output: its graph, if it had one, is not part of the node's.
  bool is_intermediate;
};

}  // namespace

class FunctionNode final : public Node {
 public:
  FunctionNode(State state, const ApplyParams& params)
      : state_(std::move(state)),
        name_(params.name, params.name_len),
        materialize_grads_(params.materialize_grads),
        double_backward_(params.double_backward) {
    live_nodes.fetch_add(1, std::memory_order_relaxed);
  }
  ~FunctionNode() override { live_nodes.fetch_sub(1, std::memory_order_relaxed); }

  std::string name() const override { return std::string(name_) + "Backward"; }

  variable_list apply(variable_list&& grads) override;
  void release_variables() override;

  // Edges lead from the present inputs only.
  void set_inputs(const ApplyParams& params, const Present& present);
  // What zeros are made of, where the node's own metadata do not say it.
  void set_outputs(const variable_list& outputs);
  void save(const ApplyParams& params, const Present& present, const variable_list& outputs);

  at::Tensor unpack(size_t slot) const;
  bool needs_input_grad(size_t input) const {
    return input < edge_of_input_.size() && edge_of_input_[input] != kNoEdge &&
           task_should_compute_output(edge_of_input_[input]);
  }

 private:
  static constexpr size_t kNoEdge = SIZE_MAX;

  variable_list materialize(variable_list&& grads) const;
  void refuse_where_not_differentiable(const variable_list& grads, variable_list& results);
  void refuse_second_derivative(const variable_list& grads, variable_list& results, const char* why);
  variable_list by_edge(variable_list&& gradients) const;

  State state_;
  std::string_view name_;  // static
  bool materialize_grads_;
  bool double_backward_;
  c10::SmallVector<size_t, 8> edge_of_input_;
  std::vector<VariableInfo> output_info_;  // empty where every output is like its metadata
  std::vector<Saved> saved_;               // guarded by mutex_
  bool freed_ = false;                     // guarded by mutex_
};

void FunctionNode::set_inputs(const ApplyParams& params, const Present& present) {
  size_t next = 0;
  edge_of_input_.reserve(params.inputs_len);
  for (size_t i = 0; i < params.inputs_len; ++i) {
    edge_of_input_.push_back(is_present(params.inputs[i]) ? next++ : kNoEdge);
  }
  edge_list edges;
  edges.reserve(present.size());
  for (const at::Tensor* input : present) edges.push_back(torch::autograd::impl::gradient_edge(*input));
  set_next_edges(std::move(edges));
}

void FunctionNode::set_outputs(const variable_list& outputs) {
  output_info_.reserve(outputs.size());
  for (const auto& output : outputs) {
    if (output.defined()) {
      output_info_.emplace_back(output);
    } else {
      output_info_.emplace_back();
    }
  }
}

void FunctionNode::save(const ApplyParams& params, const Present& present, const variable_list& outputs) {
  auto is_input = [&](const at::Tensor& tensor) {
    return std::any_of(present.begin(), present.end(),
                       [&](const at::Tensor* input) { return input->is_same(tensor); });
  };
  auto is_any_output = [&](const at::Tensor& tensor) {
    return std::any_of(outputs.begin(), outputs.end(),
                       [&](const at::Tensor& output) { return output.is_same(tensor); });
  };
  auto is_dirty = [&](const at::Tensor& tensor) {
    return std::any_of(params.dirty, params.dirty + params.dirty_len, [&](size_t index) {
      return is_present(params.inputs[index]) && params.inputs[index]->is_same(tensor);
    });
  };
  saved_.reserve(params.saved_len);
  for (size_t i = 0; i < params.saved_len; ++i) {
    if (!is_present(params.saved[i])) {
      saved_.push_back({SavedVariable(), false});
      continue;
    }
    const at::Tensor& tensor = *params.saved[i];
    // An output that holds this node as its grad_fn, saved whole, would make a cycle and never be freed.
    // The grad_fn of a view that was changed in place leads here in two steps; libtorch has a flag for that.
    const bool is_dirty_view = is_dirty(tensor) && tensor.is_view() && tensor.requires_grad();
    const bool is_output = is_dirty_view || tensor.grad_fn().get() == this;
    saved_.push_back(
        {SavedVariable(tensor, is_output, is_dirty_view), !is_input(tensor) && !is_any_output(tensor)});
  }
}

at::Tensor FunctionNode::unpack(size_t slot) const {
  // The engine may run or release this node from another thread.
  std::lock_guard<std::mutex> lock(const_cast<FunctionNode*>(this)->mutex_);
  if (freed_) throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
  if (slot >= saved_.size()) {
    throw std::runtime_error("saved tensor " + std::to_string(slot) +
                             " was asked for, but the forward saved " + std::to_string(saved_.size()));
  }
  const Saved& saved = saved_[slot];
  if (saved.is_intermediate && at::GradMode::is_enabled()) {
    throw std::runtime_error(
        "saved tensor " + std::to_string(slot) +
        " is neither an input nor an output, so a derivative through it would be silently wrong; "
        "compute it again from the inputs when Context::create_graph() is true");
  }
  return saved.variable.unpack(const_cast<FunctionNode*>(this)->getptr());
}

void FunctionNode::release_variables() {
  // Freed outside the lock: a tensor's deleter may take other locks.
  std::vector<Saved> released;
  std::lock_guard<std::mutex> lock(mutex_);
  freed_ = freed_ || !saved_.empty();
  released.swap(saved_);
}

variable_list FunctionNode::materialize(variable_list&& grads) const {
  if (!materialize_grads_) return std::move(grads);
  if (output_info_.empty()) {
    for (size_t i = 0; i < grads.size() && i < num_inputs(); ++i) {
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    }
    return std::move(grads);
  }
  at::OptionalDeviceGuard device_guard;
  for (size_t i = 0; i < grads.size() && i < output_info_.size(); ++i) {
    if (!grads[i].defined()) grads[i] = output_info_[i].zeros(device_guard);
  }
  return std::move(grads);
}

// With a backward that calls itself differentiable, a gradient without a graph is suspicious where the
// incoming gradients have one: it depends on them, unless it is zero, and a second derivative would silently
// be missing.
void FunctionNode::refuse_where_not_differentiable(const variable_list& grads, variable_list& results) {
  if (!double_backward_) {
    refuse_second_derivative(grads, results,
                             "its backward is not differentiable; set Function::DOUBLE_BACKWARD if "
                             "it is made of differentiable operations");
    return;
  }
  const bool has_graph = std::any_of(grads.begin(), grads.end(),
                                     [](const auto& grad) { return grad.defined() && grad.requires_grad(); });
  if (!has_graph) return;
  variable_list constants(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].defined() && !results[i].requires_grad()) constants[i] = results[i];
  }
  refuse_second_derivative(grads, constants,
                           "Function::DOUBLE_BACKWARD is set, but its backward built no graph");
  for (size_t i = 0; i < results.size(); ++i) {
    if (constants[i].defined()) results[i] = constants[i];
  }
}

// Makes a derivative of these gradients an error. PyTorch's once_differentiable hangs its error on tensors of
// its own, so a second derivative that reaches the inputs some other way silently lacks a term. Here the
// error stands on every way on: to this node's inputs and to whatever made the incoming gradients.
void FunctionNode::refuse_second_derivative(const variable_list& grads, variable_list& results,
                                            const char* why) {
  edge_list edges;
  for (const Edge& edge : next_edges()) {
    if (edge.is_valid()) edges.push_back(edge);
  }
  for (const auto& grad : grads) {
    if (grad.defined() && grad.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(grad));
  }
  auto error = std::shared_ptr<torch::autograd::Error>(
      new torch::autograd::Error(std::string(name_) + ": the second derivative is not defined: " + why,
                                 std::move(edges)),
      torch::autograd::deleteNode);
  for (auto& result : results) {
    if (!result.defined()) continue;
    // Without whatever graph it has, such as that of an incoming gradient passed through.
    result = result.detach();
    torch::autograd::set_history(result, error);
  }
}

variable_list FunctionNode::by_edge(variable_list&& gradients) const {
  // Without absent inputs, edges are inputs.
  if (gradients.size() == num_outputs()) return std::move(gradients);
  variable_list edges(num_outputs());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (edge_of_input_[i] != kNoEdge) {
      edges[edge_of_input_[i]] = std::move(gradients[i]);
    } else if (gradients[i].defined()) {
      throw std::runtime_error(std::string(name_) + ": backward returned a gradient for input " +
                               std::to_string(i) + ", which was absent; return none there");
    }
  }
  return edges;
}

variable_list FunctionNode::apply(variable_list&& grads) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (freed_) throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
  }
  // Not under the lock: a backward may run another backward that comes through this very node.
  grads = materialize(std::move(grads));
  const bool create_graph = at::GradMode::is_enabled();
  BackwardResults results{variable_list(edge_of_input_.size()), {}};
  c10::SmallVector<std::unique_ptr<at::Tensor>, 4> handles;
  for (auto& grad : grads) {
    handles.push_back(grad.defined() ? std::make_unique<at::Tensor>(grad) : nullptr);
  }
  c10::SmallVector<at::Tensor*, 4> pointers;
  for (auto& handle : handles) pointers.push_back(handle.release());
  int status = 0;
  {
    at::AutoGradMode mode(create_graph && double_backward_);
    status = state_.backward(this, pointers.data(), pointers.size(), results);
  }
  if (status != 0) throw std::runtime_error(std::string(name_) + ": " + results.error);
  if (create_graph) refuse_where_not_differentiable(grads, results.gradients);
  return by_edge(std::move(results.gradients));
}

namespace {

std::unordered_set<at::TensorImpl*> chosen(at::Tensor* const* tensors, const size_t* indices, size_t len) {
  std::unordered_set<at::TensorImpl*> set;
  for (size_t i = 0; i < len; ++i) {
    if (is_present(tensors[indices[i]])) set.insert(tensors[indices[i]]->unsafeGetTensorImpl());
  }
  return set;
}

// libtorch attributes a change of a view to the first input, whichever it was.
void check_dirty_views(const ApplyParams& params, const Present& present) {
  for (size_t i = 0; i < params.dirty_len; ++i) {
    const at::Tensor* dirty = params.inputs[params.dirty[i]];
    if (is_present(dirty) && dirty->is_view() && !present.front()->is_same(*dirty)) {
      throw std::runtime_error("mark_dirty(" + std::to_string(params.dirty[i]) +
                               "): a view that is changed in place has to be the first input");
    }
  }
}

// Whether each output is new, and all that has to be done is to hang the node on it.
bool all_are_new(const ApplyParams& params, const Present& present) {
  if (params.dirty_len + params.non_differentiable_len > 0) return false;
  for (const at::Tensor* input : present) {
    if (input->_fw_grad(/*level=*/0).defined()) return false;
  }
  for (size_t i = 0; i < params.outputs_len; ++i) {
    const at::Tensor* output = params.outputs[i];
    if (!is_present(output) || output->is_view() || output->requires_grad() ||
        !torch::autograd::isDifferentiableType(output->scalar_type())) {
      return false;
    }
    auto is_same = [&](const at::Tensor* other) { return other->is_same(*output); };
    if (std::any_of(present.begin(), present.end(), is_same)) return false;
    if (std::any_of(params.outputs, params.outputs + i, is_same)) return false;
  }
  return true;
}

// What _wrap_outputs does for such outputs, without its tables.
variable_list hang_on(const ApplyParams& params, const std::shared_ptr<Node>& node) {
  variable_list outputs(params.outputs_len);
  for (size_t i = 0; i < params.outputs_len; ++i) {
    outputs[i] = *params.outputs[i];
    torch::autograd::impl::set_gradient_edge(outputs[i], {node, node->add_input_metadata(outputs[i])});
  }
  return outputs;
}

// The only call of an interface that libtorch changes between releases.
variable_list wrap_outputs(const ApplyParams& params, const Present& present,
                           const std::shared_ptr<Node>& node) {
  std::vector<std::optional<at::Tensor>> raw(params.outputs_len);
  for (size_t i = 0; i < params.outputs_len; ++i) {
    if (is_present(params.outputs[i])) raw[i] = *params.outputs[i];
  }
  variable_list inputs;
  for (const at::Tensor* input : present) inputs.push_back(*input);
  auto dirty = chosen(params.inputs, params.dirty, params.dirty_len);
  for (auto* tensor : dirty) tensor->bump_version();
  auto no_jvp = [](const variable_list&, const variable_list&) -> variable_list {
    throw std::runtime_error("forward-mode derivatives are not defined for operators written in Rust");
  };
  auto view_as_self = [](const at::Tensor& tensor) { return tensor.view_as(tensor); };
  auto wrapped = torch::autograd::_wrap_outputs(
      inputs, chosen(params.outputs, params.non_differentiable, params.non_differentiable_len), dirty, raw,
      node, no_jvp, /*to_save_if_setup_context=*/{}, view_as_self, /*pure_view=*/false);
  variable_list outputs(wrapped.size());
  for (size_t i = 0; i < wrapped.size(); ++i) {
    if (wrapped[i].has_value()) outputs[i] = *std::move(wrapped[i]);
  }
  return outputs;
}

variable_list tensors(at::Tensor* const* pointers, size_t len) {
  variable_list list(len);
  for (size_t i = 0; i < len; ++i) {
    if (pointers[i] != nullptr) list[i] = *pointers[i];
  }
  return list;
}

// Hands a list to Rust, which owns the handles; absent tensors are null.
void release_to(at::Tensor** results, variable_list&& list) {
  c10::SmallVector<std::unique_ptr<at::Tensor>, 8> handles;
  handles.resize(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].defined()) handles[i] = std::make_unique<at::Tensor>(std::move(list[i]));
  }
  for (size_t i = 0; i < handles.size(); ++i) results[i] = handles[i].release();
}

}  // namespace
}  // namespace tch_extension

using namespace tch_extension;

TCH_EXTENSION_API bool tch_extension_requires_grad(const at::Tensor* tensor) {
  return tensor->defined() && tensor->requires_grad();
}

TCH_EXTENSION_API bool tch_extension_defined(const at::Tensor* tensor) { return tensor->defined(); }

struct ForwardMode {
  bool grad_mode_before;
  bool needs_graph;
};

// Grad mode goes off for a forward. It needs a graph if the mode was on and an input requires grad.
TCH_EXTENSION_API ForwardMode tch_extension_begin_forward(at::Tensor* const* inputs, size_t len) {
  const bool before = at::GradMode::is_enabled();
  if (!before) return {false, false};
  at::GradMode::set_enabled(false);
  return {true, std::any_of(inputs, inputs + len, [](const at::Tensor* input) {
            return is_present(input) && input->requires_grad();
          })};
}

TCH_EXTENSION_API bool tch_extension_grad_mode() { return at::GradMode::is_enabled(); }

// Returns the mode before.
TCH_EXTENSION_API bool tch_extension_set_grad_mode(bool enabled) {
  const bool before = at::GradMode::is_enabled();
  at::GradMode::set_enabled(enabled);
  return before;
}

// Attaches a node to the outputs of a forward that has run. Takes `state` in any case. `wrapped`:
// [params->outputs_len], owned by the caller on success, untouched on failure.
TCH_EXTENSION_API Message tch_extension_apply(const ApplyParams* params, void* state,
                                              const FunctionVTable* vtable, at::Tensor** wrapped) {
  State owned(state, vtable);  // first: whatever is thrown below, the state is dropped
  return guard([&] {
    Present present;
    for (size_t i = 0; i < params->inputs_len; ++i) {
      if (is_present(params->inputs[i])) present.push_back(params->inputs[i]);
    }
    const bool needs_graph = at::GradMode::is_enabled() &&
                             std::any_of(present.begin(), present.end(),
                                         [](const at::Tensor* input) { return input->requires_grad(); });
    check_dirty_views(*params, present);
    std::shared_ptr<FunctionNode> node;
    if (needs_graph) {
      // deleteNode takes a long graph apart in a loop; plain delete would recurse and overflow the stack.
      node = std::shared_ptr<FunctionNode>(new FunctionNode(std::move(owned), *params),
                                           torch::autograd::deleteNode);
      node->set_inputs(*params, present);
    }
    const bool is_plain = node && all_are_new(*params, present);
    auto outputs = is_plain ? hang_on(*params, node) : wrap_outputs(*params, present, node);
    if (node) {
      if (!is_plain && params->materialize_grads) node->set_outputs(outputs);
      node->save(*params, present, outputs);
    }
    release_to(wrapped, std::move(outputs));
  });
}

// A saved tensor, checked to be as it was when it was saved; null when it was absent.
TCH_EXTENSION_API Message tch_extension_saved(const FunctionNode* node, size_t slot, at::Tensor** tensor) {
  return guard([&] {
    at::Tensor saved = node->unpack(slot);
    *tensor = saved.defined() ? std::make_unique<at::Tensor>(std::move(saved)).release() : nullptr;
  });
}

TCH_EXTENSION_API bool tch_extension_needs_input_grad(const FunctionNode* node, size_t input) {
  return node->needs_input_grad(input);
}

// Takes the handle.
TCH_EXTENSION_API void tch_extension_give_gradient(BackwardResults* results, size_t input, at::Tensor* grad) {
  const std::unique_ptr<at::Tensor> owned(grad);
  if (input < results->gradients.size()) results->gradients[input] = std::move(*owned);
}

TCH_EXTENSION_API void tch_extension_set_backward_error(BackwardResults* results, const char* text,
                                                        size_t len) {
  results->error.assign(text, len);
}

// torch.autograd.grad. `grad_outputs`: [outputs_len], or grad_outputs_len 0 for ones (scalars only).
// `retain_graph`: -1 for the value of create_graph. `results`: [inputs_len], null where unused.
TCH_EXTENSION_API Message tch_extension_grad(at::Tensor* const* outputs, size_t outputs_len,
                                             at::Tensor* const* inputs, size_t inputs_len,
                                             at::Tensor* const* grad_outputs, size_t grad_outputs_len,
                                             int retain_graph, bool create_graph, bool allow_unused,
                                             at::Tensor** results) {
  return guard([&] {
    auto retain = retain_graph < 0 ? std::optional<bool>() : std::optional<bool>(retain_graph != 0);
    release_to(results, torch::autograd::grad(tensors(outputs, outputs_len), tensors(inputs, inputs_len),
                                              tensors(grad_outputs, grad_outputs_len), retain, create_graph,
                                              allow_unused));
  });
}

// Nodes of this bridge that exist at the moment: the leak tests' measure.
TCH_EXTENSION_API int64_t tch_extension_live_nodes() { return live_nodes.load(std::memory_order_relaxed); }

TCH_EXTENSION_API void tch_extension_free_message(char* message) { std::free(message); }
