// The tensors that a node keeps for its backward.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "wrap.h"

namespace tch_extension {

// Why a saved tensor has no history that a backward may differentiate through.
enum class History {
  kKept,
  // It is neither an input nor an output: its graph, if it had one, is not part of the node's.
  kIntermediate,
  // It shares memory with an output, or an input changed in place, so that its history leads to
  // this very node.
  kAlias,
};

struct Saved {
  torch::autograd::SavedVariable variable;
  History history;
};

// Saves what the forward asked for. `node` is the one that will hold it, already attached to
// `outputs`.
std::vector<Saved> save(const ApplyParams& params, const Present& present,
                        const torch::autograd::variable_list& outputs,
                        const torch::autograd::Node* node);

// Throws where reading this slot with grad mode on would make a second derivative silently wrong.
void check_history(const Saved& saved, size_t slot);

// Shared by the node and by whoever unpacks at the moment.
using SavedList = std::shared_ptr<const std::vector<Saved>>;

// Lets go of saved tensors. Each may be the last owner of a graph whose nodes hold saved tensors
// again; a chain of them is freed in a loop, because recursion would overflow the stack.
void free_saved(SavedList saved) noexcept;

}  // namespace tch_extension
