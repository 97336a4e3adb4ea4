#include "batch.h"

// The newer header is first, because the functions of the older one have the same names, and those
// here would find both.
// clang-format off
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/LegacyBatchedTensorImpl.h>
// clang-format on
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <utility>

namespace tch_extension {

using torch::autograd::variable_list;

namespace {

// The innermost batch of one tensor.
std::optional<Batch> batch_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return std::nullopt;
  if (const auto* batched = at::functorch::maybeGetBatchedImpl(tensor))
    return Batch{true, batched->level(), batched->value().size(batched->bdim())};
  if (const auto* batched = at::maybeGetBatchedImpl(tensor)) {
    const auto& innermost = batched->bdims().back();  // they are sorted by their levels
    return Batch{false, innermost.level(), batched->value().size(innermost.dim())};
  }
  return std::nullopt;
}

bool is_of(const at::Tensor& tensor, const Batch& batch) {
  const auto found = batch_of(tensor);
  return found && found->is_of_func == batch.is_of_func && found->level == batch.level;
}

at::Tensor element_of(const at::Tensor& tensor, const Batch& batch, int64_t index) {
  if (!is_of(tensor, batch)) return tensor;
  if (batch.is_of_func) {
    const auto* batched = at::functorch::maybeGetBatchedImpl(tensor);
    return batched->value().select(batched->bdim(), index);
  }
  const auto* batched = at::maybeGetBatchedImpl(tensor);
  const int64_t removed = batched->bdims().back().dim();
  at::BatchDims others;
  for (const auto& other : batched->bdims().slice(0, batched->bdims().size() - 1))
    others.emplace_back(other.level(), other.dim() - (other.dim() > removed ? 1 : 0));
  at::Tensor element = batched->value().select(removed, index);
  return others.empty() ? element : at::makeBatched(std::move(element), std::move(others));
}

}  // namespace

std::optional<Batch> innermost_batch(const variable_list& tensors) {
  std::optional<Batch> innermost;
  for (const auto& tensor : tensors) {
    const auto batch = batch_of(tensor);
    if (batch && (!innermost || batch->level > innermost->level)) innermost = batch;
  }
  return innermost;
}

variable_list element_of(const variable_list& tensors, const Batch& batch, int64_t index) {
  variable_list elements;
  for (const auto& tensor : tensors) elements.push_back(element_of(tensor, batch, index));
  return elements;
}

variable_list batched(const std::vector<variable_list>& elements, const Batch& batch) {
  variable_list results(elements.front().size());
  for (size_t place = 0; place < results.size(); ++place) {
    const auto present =
        std::find_if(elements.begin(), elements.end(),
                     [&](const variable_list& element) { return element[place].defined(); });
    if (present == elements.end()) continue;
    variable_list parts;
    for (const auto& element : elements)
      parts.push_back(element[place].defined() ? element[place]
                                               : at::zeros_like((*present)[place]));
    at::Tensor all = at::stack(parts);
    results[place] = batch.is_of_func ? at::functorch::makeBatched(std::move(all), 0, batch.level)
                                      : at::addBatchDim(std::move(all), batch.level, 0);
  }
  return results;
}

}  // namespace tch_extension
