// Functions that attach a node to the outputs of a forward pass.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "../libtorch_versions.h"
#include "bridge.h"

namespace tch_extension {

inline bool is_present(const at::Tensor* tensor) { return tensor != nullptr && tensor->defined(); }

// Whether the tensor has a gradient of forward-mode AD: whether it is a dual tensor.
inline bool has_forward_gradient(const at::Tensor& tensor) {
  // A tensor or a base that was never a dual tensor has no room for one. Asking libtorch takes two
  // locks.
  const auto never_had = [](const auto* meta) {
    return meta == nullptr || meta->fw_grad_ == nullptr;
  };
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (never_had(meta)) {
    if (meta == nullptr || !meta->is_view_) return false;
    const auto* view = static_cast<const torch::autograd::DifferentiableViewMeta*>(meta);
    if (!view->has_fw_view()) return false;
    const auto& base = view->get_forward_view().base_;
    if (never_had(torch::autograd::impl::get_autograd_meta(base))) return false;
  }
  return tensor._fw_grad(/*level=*/0).defined();  // libtorch has one level only
}

// The inputs that are present. They outlive the call.
using Present = c10::SmallVector<const at::Tensor*, 8>;

// Throws if a view is changed in place and is not the first input. This limit exists only when
// there is a graph.
void check_dirty_views(const ApplyParams& params, const Present& present);

// Throws if the graph does not allow an operator to change this tensor in place. `first` is the
// first input that is present.
void check_in_place(const at::Tensor& tensor, const at::Tensor& first);

// Whether each output is a new tensor, so that the node only has to be attached to it.
bool all_are_new(const ApplyParams& params, const Present& present);

// Does what wrap_outputs does, for new outputs only and without its lookup tables.
torch::autograd::variable_list hang_on(const ApplyParams& params,
                                       const NodePtr<torch::autograd::Node>& node);

// Attaches the node to any outputs; `node` may be null.
torch::autograd::variable_list wrap_outputs(const ApplyParams& params, const Present& present,
                                            const NodePtr<torch::autograd::Node>& node);

}  // namespace tch_extension
