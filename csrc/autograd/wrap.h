// How a node is attached to the outputs of a forward.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include "../libtorch_versions.h"
#include "bridge.h"

namespace tch_extension {

inline bool is_present(const at::Tensor* tensor) { return tensor != nullptr && tensor->defined(); }

// Of the inputs that are present. They outlive the call.
using Present = c10::SmallVector<const at::Tensor*, 8>;

// Throws for a view that is changed in place and is not the first input. Only a graph has this
// limit.
void check_dirty_views(const ApplyParams& params, const Present& present);

// Throws for a tensor that a graph does not let an operator change in place. `first`: of the inputs
// present.
void check_in_place(const at::Tensor& tensor, const at::Tensor& first);

// Whether each output is new, and all that has to be done is to hang the node on it.
bool all_are_new(const ApplyParams& params, const Present& present);

// What wrap_outputs does for such outputs, without its tables.
torch::autograd::variable_list hang_on(const ApplyParams& params,
                                       const NodePtr<torch::autograd::Node>& node);

// For any outputs; `node` may be null.
torch::autograd::variable_list wrap_outputs(const ApplyParams& params, const Present& present,
                                            const NodePtr<torch::autograd::Node>& node);

}  // namespace tch_extension
