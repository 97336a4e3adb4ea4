#include "function_node.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <typeinfo>
#include <utility>

#include "../tensor/touched.h"
#include "batch.h"
#include "stand_ins.h"

namespace tch_extension {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::variable_list;

namespace {

std::atomic<int64_t> live_nodes{0};

// Whether a backward pass holds the only reference to an incoming gradient and to its memory. The
// engine, too, adds in place only then: others may be whoever called, a hook, or another node.
bool is_owned(const at::Tensor& grad) {
  return grad.defined() && grad.use_count() == 1 && grad.has_storage() &&
         grad.storage().use_count() == 1;
}

// Prints, as a libtorch warning, where the forward pass of a failed node was called, as Rust saw
// it. libtorch calls it in anomaly mode.
class ForwardTrace final : public torch::autograd::AnomalyMetadata {
 public:
  explicit ForwardTrace(std::string text) : text_(std::move(text)) {}

  void print_stack(const std::string& node) override {
    TORCH_WARN("Error detected in ", node, ". The forward that made it was called here:\n", text_);
    if (parent_ == nullptr) return;
    TORCH_WARN("Error detected in ", node, ", which was made by the backward of ", parent_->name(),
               ":");
    parent_->metadata()->print_stack(parent_->name());
  }

  // `parent` is the node whose backward pass made this node, if there is one.
  void assign_parent(const NodePtr<torch::autograd::Node>& parent) override {
    parent_ = parent;
    AnomalyMetadata::assign_parent(parent);  // so that libtorch can print the chain of parents, too
  }

 private:
  std::string text_;
  NodePtr<torch::autograd::Node> parent_;
};

}  // namespace

// Saved tensors of a node whose backward pass runs once for each element of a batch. A hook unpacks
// each tensor once, as it does for other backward passes.
class FunctionNode::UnpackedOnce {
 public:
  explicit UnpackedOnce(const FunctionNode& node) : node_(node), outer_(innermost) {
    innermost = this;
  }
  UnpackedOnce(const UnpackedOnce&) = delete;
  UnpackedOnce& operator=(const UnpackedOnce&) = delete;
  ~UnpackedOnce() { innermost = outer_; }

  // The place for a tensor of this node, or null if its backward pass does not run in this way.
  static std::optional<at::Tensor>* find(const FunctionNode& node, size_t slot) {
    if (innermost == nullptr || &innermost->node_ != &node) return nullptr;
    auto& tensors = innermost->tensors_;
    if (slot >= tensors.size()) tensors.resize(slot + 1);
    return &tensors[slot];
  }

 private:
  static thread_local UnpackedOnce* innermost;
  const FunctionNode& node_;
  UnpackedOnce* outer_;
  std::vector<std::optional<at::Tensor>> tensors_;
};

thread_local FunctionNode::UnpackedOnce* FunctionNode::UnpackedOnce::innermost = nullptr;

int64_t FunctionNode::live() { return live_nodes.load(std::memory_order_relaxed); }

FunctionNode::FunctionNode(State state, const ApplyParams& params)
    : state_(std::move(state)),
      name_(params.name, params.name_len),
      materialize_grads_(params.materialize_grads),
      double_backward_(params.double_backward),
      without_autocast_(params.without_autocast),
      one_by_one_(params.reads_memory &&
                  std::none_of(params.inputs, params.inputs + params.inputs_len,
                               [](const at::Tensor* input) {
                                 return is_present(input) && is_stand_in(*input);
                               })) {
  live_nodes.fetch_add(1, std::memory_order_relaxed);
  if (params.trace == nullptr || anomaly_metadata_ == nullptr) return;
  // If Python runs in this process, the metadata object is Python's own, and Python relies on that:
  // leave it.
  const auto& metadata = *anomaly_metadata_;
  if (typeid(metadata) != typeid(torch::autograd::AnomalyMetadata)) return;
  anomaly_metadata_ = std::make_unique<ForwardTrace>(std::string(params.trace, params.trace_len));
  assign_parent();
}

FunctionNode::~FunctionNode() {
  free_own();
  live_nodes.fetch_sub(1, std::memory_order_relaxed);
}

void FunctionNode::free_own() noexcept {
  release_variables();
  state_.reset();
}

void FunctionNode::set_inputs(const ApplyParams& params, const Present& present) {
  size_t next = 0;
  edge_of_input_.reserve(params.inputs_len);
  for (size_t i = 0; i < params.inputs_len; ++i) {
    edge_of_input_.push_back(is_present(params.inputs[i]) ? next++ : kNoEdge);
  }
  edge_list edges;
  edges.reserve(present.size());
  for (const at::Tensor* input : present)
    edges.push_back(torch::autograd::impl::gradient_edge(*input));
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

void FunctionNode::set_saved(std::vector<Saved> saved) {
  if (saved.empty()) return;
  has_hooks_ = std::any_of(saved.begin(), saved.end(),
                           [](const Saved& each) { return each.variable.has_hooks(); });
  saved_ = std::make_shared<const std::vector<Saved>>(std::move(saved));
}

at::Tensor FunctionNode::unpack(size_t slot) const {
  SavedList saved;
  {
    // The engine may run or release this node from another thread. An unpack hook runs below, after
    // the lock is released.
    std::lock_guard<std::mutex> lock(const_cast<FunctionNode*>(this)->mutex_);
    if (freed_) throw std::runtime_error(torch::autograd::ERR_BACKWARD_TWICE);
    saved = saved_;
  }
  const size_t len = saved == nullptr ? 0 : saved->size();
  if (slot >= len) {
    throw std::runtime_error("saved tensor " + std::to_string(slot) +
                             " was asked for, but the forward saved " + std::to_string(len));
  }
  auto* place = UnpackedOnce::find(*this, slot);
  const Saved& each = (*saved)[slot];
  if (creates_graph()) check_history(each, slot);
  if (place != nullptr && place->has_value()) return **place;
  at::Tensor tensor =
      as_saved(each, each.variable.unpack(const_cast<FunctionNode*>(this)->getptr()));
  touch(tensor);
  if (place != nullptr) *place = tensor;
  return tensor;
}

void FunctionNode::release_variables() {
  SavedList released;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    freed_ = freed_ || saved_ != nullptr;
    released.swap(saved_);
  }
  // Free them outside the lock, because a tensor's deleter may take other locks.
  free_saved(std::move(released));
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

// Makes a second derivative an error where it would be wrong. If the backward pass is declared
// differentiable, a gradient without a graph is suspicious when an incoming gradient has one: a
// gradient depends on the incoming gradients unless it is zero, so a second derivative would
// silently lack a term.
void FunctionNode::refuse_where_not_differentiable(const variable_list& grads,
                                                   BackwardResults& results) {
  variable_list& gradients = results.gradients;
  if (!double_backward_) {
    refuse_second_derivative(grads, gradients,
                             "its backward is not differentiable; declare that it is, with "
                             "Function::DOUBLE_BACKWARD or `double_backward = true` in "
                             "operators!, if it is made of differentiable operations");
    return;
  }
  const bool has_graph = std::any_of(grads.begin(), grads.end(), [](const auto& grad) {
    return grad.defined() && grad.requires_grad();
  });
  if (!has_graph) return;
  // A gradient is linear in the incoming gradients, so one that does not depend on them is zero.
  auto is_constant = [&](size_t place) {
    const auto& places = results.constants;
    return std::find(places.begin(), places.end(), place) != places.end() &&
           gradients[place].count_nonzero().item<int64_t>() == 0;
  };
  variable_list suspects(gradients.size());
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (gradients[i].defined() && !gradients[i].requires_grad() && !is_constant(i))
      suspects[i] = gradients[i];
  }
  refuse_second_derivative(
      grads, suspects,
      "Function::DOUBLE_BACKWARD is set, but its backward built no graph; a gradient that does "
      "not depend on the incoming ones is zero, as that of floor: declare such zeros by "
      "Context::mark_constant, or return None");
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (suspects[i].defined()) gradients[i] = suspects[i];
  }
}

// Makes a derivative of these gradients an error. PyTorch's once_differentiable attaches its error
// to tensors of its own, so a second derivative that reaches the inputs by another path silently
// lacks a term. Here the error node has edges to this node's inputs and to whatever made the
// incoming gradients, so every path runs into it.
void FunctionNode::refuse_second_derivative(const variable_list& grads, variable_list& results,
                                            const char* why) {
  edge_list edges;
  for (const Edge& edge : next_edges()) {
    if (edge.is_valid()) edges.push_back(edge);
  }
  for (const auto& grad : grads) {
    if (grad.defined() && grad.requires_grad())
      edges.push_back(torch::autograd::impl::gradient_edge(grad));
  }
  auto error = make_node<torch::autograd::Error>(
      std::string(name_) + ": the second derivative is not defined: " + why, std::move(edges));
  for (auto& result : results) {
    if (!result.defined()) continue;
    // Remove any graph that the result already has, such as that of an incoming gradient that was
    // passed through.
    result = without_graph(result);
    torch::autograd::set_history(result, error);
  }
}

// The engine would sum a gradient of a larger shape, and its error for a complex gradient of a real
// input does not say whose it is.
void FunctionNode::check_gradient(size_t input, const at::Tensor& gradient) const {
  const size_t edge = edge_of_input_[input];
  if (!gradient.defined() || edge == kNoEdge || !next_edge(edge).is_valid()) return;
  const auto& metadata = next_edge(edge).function->input_metadata(next_edge(edge).input_nr);
  if (metadata.was_default_constructed()) return;
  auto refuse = [&](const auto& what, const auto& got, const auto& expected, const char* hint) {
    std::ostringstream text;
    text << name_ << ": the gradient of input " << input << " has " << what << " " << got
         << ", expected " << expected << ", as the input; " << hint;
    throw std::runtime_error(text.str());
  };
  const at::ScalarType kind = c10::typeMetaToScalarType(metadata.dtype());
  const at::ScalarType got = gradient.scalar_type();
  if (!c10::isFloatingType(got) && c10::isComplexType(kind) != c10::isComplexType(got)) {
    refuse("kind", got, kind, c10::isComplexType(got) ? "take its real part" : "convert it");
  }
  // Nested tensors have no sizes to compare.
  if (metadata.is_nested_tensor() || gradient.is_nested()) return;
  if (!metadata.is_same_shape(gradient)) {
    refuse("shape", gradient.sym_sizes(), metadata.shape_as_dim_vector(),
           "sum over what was broadcast, with sum_to_size");
  }
}

variable_list FunctionNode::by_edge(variable_list&& gradients) const {
  for (size_t i = 0; i < gradients.size(); ++i) check_gradient(i, gradients[i]);
  // If no input is absent, the indices of edges are those of inputs.
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
  // The lock must not be held here, because a backward pass may run another one that comes through
  // this very node.
  grads = materialize(std::move(grads));
  const bool is_last = is_last_.exchange(false, std::memory_order_relaxed);
  if (C10_UNLIKELY(one_by_one_ && std::any_of(grads.begin(), grads.end(), [](const auto& grad) {
                     return grad.defined() && is_stand_in(grad);
                   }))) {
    const UnpackedOnce once(*this);
    return by_edge(run_for_each(grads));
  }
  return by_edge(run(grads, is_last));
}

variable_list FunctionNode::run(const variable_list& grads, bool is_last) {
  const bool create_graph = at::GradMode::is_enabled();
  BackwardResults results{variable_list(edge_of_input_.size()), {}, {}};
  // What an unpack hook returns may be its owner's, so no pass is the last one to read it.
  results.is_last = is_last && !has_hooks_;
  c10::SmallVector<std::unique_ptr<at::Tensor>, 4> handles;
  for (auto& grad : grads) {
    const size_t output = handles.size();
    if (output < 64 && is_owned(grad)) results.owned |= uint64_t{1} << output;
    handles.push_back(grad.defined() ? std::make_unique<at::Tensor>(grad) : nullptr);
  }
  c10::SmallVector<at::Tensor*, 4> pointers;
  for (auto& handle : handles) pointers.push_back(handle.release());
  {
    std::optional<WithoutGraph> without_graph;
    if (!(create_graph && double_backward_)) without_graph.emplace();
    std::optional<c10::impl::ExcludeDispatchKeyGuard> without_autocast;
    if (without_autocast_) without_autocast.emplace(c10::autocast_dispatch_keyset);
    state_.backward(name_, this, pointers.data(), pointers.size(), results);
  }
  if (create_graph) refuse_where_not_differentiable(grads, results);
  return std::move(results.gradients);
}

// The saved tensors are no batch, because the inputs were none: the gradients alone are.
variable_list FunctionNode::run_for_each(const variable_list& grads) {
  const auto any = [&](auto is_it) {
    return std::any_of(grads.begin(), grads.end(),
                       [&](const auto& grad) { return grad.defined() && is_it(grad); });
  };
  if (!any(is_stand_in)) {
    // The transforms have nothing to do here, and the backward pass is one of tensors with memory.
    const c10::impl::ExcludeDispatchKeyGuard without_transforms(
        c10::DispatchKeySet({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                             c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                             c10::DispatchKey::FuncTorchVmapMode, c10::DispatchKey::VmapMode}));
    return run(grads, /*is_last=*/false);
  }
  // What a level of derivatives wraps may itself be a batch. Operations take it as it is.
  const bool is_wrapped = any(
      [](const auto& grad) { return grad.key_set().has(c10::DispatchKey::FuncTorchGradWrapper); });
  const auto batch = is_wrapped ? std::nullopt : innermost_batch(grads);
  if (!batch) return run(grads, /*is_last=*/false);
  if (batch->size == 0) {
    throw std::runtime_error(std::string(name_) +
                             ": backward: expected a batch of gradients, got one of size 0");
  }
  std::vector<variable_list> gradients;
  for (int64_t index = 0; index < batch->size; ++index)
    gradients.push_back(run_for_each(element_of(grads, *batch, index)));
  return batched(gradients, *batch);
}

void FunctionNode::compiled_args(torch::autograd::CompiledNodeArgs&) const {
  refuse_compiled_autograd(name());
}

}  // namespace tch_extension
