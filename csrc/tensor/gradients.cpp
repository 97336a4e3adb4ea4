// What a training step needs and tch lacks: which tensors are the gradients, and copies that the
// host does not wait for.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_zero.h>

#include <vector>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Makes gradients[i] the `grad` of tensors[i]. A null pointer or an undefined tensor removes it.
// The caller made sure that shapes, kinds and devices fit. If `changed` is true, autograd is told
// that the tensors' values change.
TCH_EXTENSION_API Message tch_extension_set_gradients(const at::Tensor* const* tensors,
                                                      const at::Tensor* const* gradients,
                                                      size_t len, bool changed) {
  return guard([&] {
    for (size_t i = 0; i < len; ++i) {
      at::Tensor& gradient = tensors[i]->mutable_grad();
      const at::Tensor next = gradients[i] != nullptr ? *gradients[i] : at::Tensor();
      if (!gradient.is_same(next)) gradient = next;
      if (changed) tensors[i]->unsafeGetTensorImpl()->bump_version();
    }
  });
}

// Sets tensors to zero, with few kernels if they have one kind and device.
TCH_EXTENSION_API Message tch_extension_zero(const at::Tensor* const* tensors, size_t len) {
  return guard([&] {
    std::vector<at::Tensor> list;
    list.reserve(len);
    for (size_t i = 0; i < len; ++i) list.push_back(*tensors[i]);
    if (!list.empty()) at::_foreach_zero_(list);
  });
}

// Copies values. The host does not wait for the device if the source is on a GPU or in pinned
// memory.
TCH_EXTENSION_API Message tch_extension_copy(const at::Tensor* to, const at::Tensor* from) {
  return guard([&] { to->copy_(*from, /*non_blocking=*/true); });
}

// A copy with memory and without history of its own.
TCH_EXTENSION_API Message tch_extension_snapshot(const at::Tensor* tensor, at::Tensor** result) {
  return guard([&] { *result = new at::Tensor(tensor->detach().clone()); });
}
