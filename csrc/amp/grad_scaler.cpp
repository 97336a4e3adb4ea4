// What GradScaler needs beside tch: libtorch's check of many gradients in one go, and which tensor
// is which.

#include <ATen/ATen.h>

#include <vector>

#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Multiplies the gradients, all of one device and kind, by `inverse_scale`, and adds to `found_inf`
// if one was not finite. Both are scalars of kind Float on that device.
TCH_EXTENSION_API Message tch_extension_amp_unscale(at::Tensor* const* gradients, size_t len,
                                                    at::Tensor* found_inf,
                                                    const at::Tensor* inverse_scale) {
  return guard([&] {
    std::vector<at::Tensor> list;
    list.reserve(len);
    for (size_t i = 0; i < len; ++i) list.push_back(*gradients[i]);
    at::_amp_foreach_non_finite_check_and_unscale_(list, *found_inf, *inverse_scale);
  });
}

// The same for all handles of a tensor, and for no other tensor while one of them lives.
TCH_EXTENSION_API const void* tch_extension_identity(const at::Tensor* tensor) {
  return tensor->unsafeGetTensorImpl();
}
