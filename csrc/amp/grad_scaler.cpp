// What GradScaler needs and tch lacks: libtorch's check of many gradients in one call, and an
// identity for tensors.

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>

#include <vector>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Multiplies the gradients by `inverse_scale`, and sets `found_inf` if one of them was not finite.
// All gradients have the same device and kind; `inverse_scale` and `found_inf` are scalars of kind
// Float on that device.
TCH_EXTENSION_API Message tch_extension_amp_unscale(const at::Tensor* const* gradients, size_t len,
                                                    at::Tensor* found_inf,
                                                    const at::Tensor* inverse_scale) {
  return guard([&] {
    std::vector<at::Tensor> list;
    list.reserve(len);
    for (size_t i = 0; i < len; ++i) list.push_back(*gradients[i]);
    at::_amp_foreach_non_finite_check_and_unscale_(list, *found_inf, *inverse_scale);
  });
}

// An address that identifies the tensor. All handles of a tensor have the same one, and no other
// tensor has it while one of them lives.
TCH_EXTENSION_API const void* tch_extension_identity(const at::Tensor* tensor) {
  return tensor->unsafeGetTensorImpl();
}
