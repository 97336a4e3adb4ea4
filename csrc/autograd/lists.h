// Conversions between Rust's arrays of tensor pointers and libtorch's lists.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace tch_extension {

// Makes a list from an array of pointers. A null pointer becomes an undefined tensor.
inline torch::autograd::variable_list tensors(const at::Tensor* const* pointers, size_t len) {
  torch::autograd::variable_list list(len);
  for (size_t i = 0; i < len; ++i) {
    if (pointers[i] != nullptr) list[i] = *pointers[i];
  }
  return list;
}

// Writes a list to an array of handles that Rust then owns. An undefined tensor becomes null.
inline void release_to(at::Tensor** results, torch::autograd::variable_list&& list) {
  c10::SmallVector<std::unique_ptr<at::Tensor>, 8> handles;
  handles.resize(list.size());
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i].defined()) handles[i] = std::make_unique<at::Tensor>(std::move(list[i]));
  }
  for (size_t i = 0; i < handles.size(); ++i) results[i] = handles[i].release();
}

}  // namespace tch_extension
