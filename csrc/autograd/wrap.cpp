#include "wrap.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "levels.h"

namespace tch_extension {

using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

std::unordered_set<at::TensorImpl*> chosen(at::Tensor* const* tensors, const size_t* indices,
                                           size_t len) {
  std::unordered_set<at::TensorImpl*> set;
  for (size_t i = 0; i < len; ++i) {
    if (is_present(tensors[indices[i]])) set.insert(tensors[indices[i]]->unsafeGetTensorImpl());
  }
  return set;
}

// Whether an output is a view that was made with grad mode off. If it requires grad, it is because
// its base does.
bool is_view_without_a_graph(const at::Tensor& output) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(output);
  return meta != nullptr && meta->has_bw_view() && !meta->grad_fn_ && !meta->requires_grad_;
}

// Whether an output has a graph of its own and must be detached. The forward pass may have built
// that graph with grad mode switched on, or the output may be a tensor from elsewhere. libtorch
// would cut that very tensor off its graph or attach the node to it, and everyone who holds the
// tensor would see that. If there is no node (`is_constant`), libtorch would return a view together
// with its graph. If there is a node, or the view has no graph, it must stay a view, so that it
// cannot be changed in place without the node or the base noticing.
bool brings_a_graph(const at::Tensor& output, const Present& present,
                    const std::unordered_set<at::TensorImpl*>& dirty, bool is_constant) {
  if (!output.requires_grad() || dirty.count(output.unsafeGetTensorImpl()) > 0) return false;
  if (is_constant) return !is_view_without_a_graph(output);
  auto is_same = [&](const at::Tensor* input) { return input->is_same(output); };
  return !output.is_view() && std::none_of(present.begin(), present.end(), is_same);
}

}  // namespace

// libtorch assumes that a view which is changed in place is the first input, whichever input it
// was.
void check_dirty_views(const ApplyParams& params, const Present& present) {
  for (size_t i = 0; i < params.dirty_len; ++i) {
    const at::Tensor* dirty = params.inputs[params.dirty[i]];
    if (is_present(dirty) && dirty->is_view() && !present.front()->is_same(*dirty)) {
      throw std::runtime_error("mark_dirty(" + std::to_string(params.dirty[i]) +
                               "): a view that is changed in place has to be the first input");
    }
  }
}

void check_in_place(const at::Tensor& tensor, const at::Tensor& first) {
  {
    // libtorch makes this check before its own operations, with grad mode on. For our operators it
    // would make it only after the data have changed.
    const at::AutoGradMode on(true);
    torch::autograd::check_inplace(tensor, /*requires_grad=*/true);
  }
  if (tensor.is_view() && !first.is_same(tensor)) {
    throw std::runtime_error("a view that is changed in place has to be the first input");
  }
}

bool all_are_new(const ApplyParams& params, const Present& present) {
  if (params.dirty_len + params.non_differentiable_len > 0) return false;
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

variable_list hang_on(const ApplyParams& params, const NodePtr<Node>& node) {
  variable_list outputs(params.outputs_len);
  for (size_t i = 0; i < params.outputs_len; ++i) {
    outputs[i] = *params.outputs[i];
    torch::autograd::impl::set_gradient_edge(outputs[i],
                                             {node, node->add_input_metadata(outputs[i])});
  }
  return outputs;
}

// This is the only call of an interface that libtorch changes between releases.
variable_list wrap_outputs(const ApplyParams& params, const Present& present,
                           const NodePtr<Node>& node) {
  auto dirty = chosen(params.inputs, params.dirty, params.dirty_len);
  std::vector<std::optional<at::Tensor>> raw(params.outputs_len);
  for (size_t i = 0; i < params.outputs_len; ++i) {
    if (!is_present(params.outputs[i])) continue;
    const at::Tensor& output = *params.outputs[i];
    raw[i] = brings_a_graph(output, present, dirty, /*is_constant=*/!node) ? without_graph(output)
                                                                           : output;
  }
  variable_list inputs;
  for (const at::Tensor* input : present) inputs.push_back(*input);
  for (auto* tensor : dirty) tensor->bump_version();
  // Not called: an input with a forward gradient was refused before the forward pass.
  auto no_jvp = [](const variable_list&, const variable_list&) -> variable_list {
    throw std::runtime_error("internal error: an input has a forward gradient");
  };
  // libtorch calls it with grad mode off.
  auto view_as_self = [grad_mode = at::GradMode::is_enabled()](const at::Tensor& tensor) {
    const at::AutoGradMode mode(grad_mode && level() != Level::kOnly);
    const WithoutGraph without_graph;
    return tensor.view_as(tensor);
  };
  auto wrapped = torch::autograd::_wrap_outputs(
      inputs, chosen(params.outputs, params.non_differentiable, params.non_differentiable_len),
      dirty, raw, node, no_jvp, /*to_save_if_setup_context=*/{}, view_as_self, /*pure_view=*/false);
  variable_list outputs(wrapped.size());
  for (size_t i = 0; i < wrapped.size(); ++i) {
    if (wrapped[i].has_value()) outputs[i] = *std::move(wrapped[i]);
  }
  return outputs;
}

}  // namespace tch_extension
