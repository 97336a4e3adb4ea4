#include "wrap.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tch_extension {

using torch::autograd::Node;
using torch::autograd::variable_list;

namespace {

std::unordered_set<at::TensorImpl*> chosen(at::Tensor* const* tensors, const size_t* indices, size_t len) {
  std::unordered_set<at::TensorImpl*> set;
  for (size_t i = 0; i < len; ++i) {
    if (is_present(tensors[indices[i]])) set.insert(tensors[indices[i]]->unsafeGetTensorImpl());
  }
  return set;
}

}  // namespace

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

// libtorch finds both of the first only when the data have changed.
void check_in_place(const at::Tensor& tensor, const at::Tensor& first) {
  if (tensor.requires_grad() && tensor.is_leaf()) {
    throw std::runtime_error(
        "a leaf that requires grad cannot be changed in place; change a copy, such as x.copy()");
  }
  if (!tensor.is_view()) return;
  const at::TensorBase& base = tensor._base();
  if (base.requires_grad() && base.is_leaf()) {
    throw std::runtime_error("a view of a leaf that requires grad cannot be changed in place; change a copy");
  }
  if (!first.is_same(tensor)) {
    throw std::runtime_error("a view that is changed in place has to be the first input");
  }
}

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

variable_list hang_on(const ApplyParams& params, const NodePtr<Node>& node) {
  variable_list outputs(params.outputs_len);
  for (size_t i = 0; i < params.outputs_len; ++i) {
    outputs[i] = *params.outputs[i];
    torch::autograd::impl::set_gradient_edge(outputs[i], {node, node->add_input_metadata(outputs[i])});
  }
  return outputs;
}

// The only call of an interface that libtorch changes between releases.
variable_list wrap_outputs(const ApplyParams& params, const Present& present, const NodePtr<Node>& node) {
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

}  // namespace tch_extension
