// Gradients of a whole batch.
//
// Where vmap runs over a backward pass (`is_grads_batched`, `jacobian(vectorize=True)`, torch.vmap
// around torch.autograd.grad), each gradient stands for those of a whole batch, and has no memory
// that a kernel could read. libtorch has two kinds of such tensors: those of torch.func, and older
// ones, which torch.autograd makes.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace tch_extension {

// The dimension over which one vmap runs.
struct Batch {
  bool is_of_func;  // of torch.func, not of torch.autograd
  int64_t level;    // of the vmap
  int64_t size;
};

// That of the innermost vmap for which one of these tensors is a batch.
std::optional<Batch> innermost_batch(const torch::autograd::variable_list& tensors);

// The tensors for one element of the batch. One that is the same for all elements is left as it is.
torch::autograd::variable_list element_of(const torch::autograd::variable_list& tensors,
                                          const Batch& batch, int64_t index);

// The inverse: from the tensors for each element, which are as many, to those of the batch. A
// tensor that some elements lack is zero there.
torch::autograd::variable_list batched(const std::vector<torch::autograd::variable_list>& elements,
                                       const Batch& batch);

}  // namespace tch_extension
