// The tensors that a node saves for its backward pass.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "wrap.h"

namespace tch_extension {

// Whether a backward pass may differentiate through a saved tensor, and if not, why.
enum class History {
  kKept,
  // No: it is neither an input nor an output, so its graph, if it had one, is not part of the
  // node's graph.
  kIntermediate,
  // No: it shares memory with an output or with an input that was changed in place, so its history
  // leads to this very node.
  kAlias,
};

struct Saved {
  torch::autograd::SavedVariable variable;
  History history;
  // Whether hooks give it back, and it was row-major and began at 16 bytes, as all memory of
  // libtorch's does. Kernels rely on it.
  bool is_to_be_regular = false;
};

// What was unpacked, or a copy of it that is as regular as the tensor that was saved.
at::Tensor as_saved(const Saved& saved, at::Tensor unpacked);

// Saves the tensors that the forward pass chose. `node` is the node that will hold them; it is
// already attached to `outputs`.
std::vector<Saved> save(const ApplyParams& params, const Present& present,
                        const torch::autograd::variable_list& outputs,
                        const torch::autograd::Node* node);

// Throws if reading this slot for a pass that creates a graph would make a second derivative
// silently wrong.
void check_history(const Saved& saved, size_t slot);

// The list is shared by the node and by any thread that is unpacking a tensor.
using SavedList = std::shared_ptr<const std::vector<Saved>>;

// Releases saved tensors. Each of them may be the last owner of a graph whose nodes hold saved
// tensors themselves. Such a chain is freed in a loop, because recursion would overflow the stack.
void free_saved(SavedList saved) noexcept;

}  // namespace tch_extension
