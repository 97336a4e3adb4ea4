// Whether a tensor's memory is as kernels need it, and how to get such a tensor.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Whether the memory holds the tensor's values themselves, in any order. libtorch also has tensors
// whose values are the negated or conjugated contents of memory, and tensors of zeros without
// memory; `is_contiguous` is true for all of them. Tensors that only represent others, as vmap's
// do, throw when they are asked for their memory.
TCH_EXTENSION_API bool tch_extension_is_in_memory(const at::Tensor* tensor) {
  return tensor->defined() && tensor->layout() == at::kStrided && !tensor->is_neg() &&
         !tensor->is_conj() && !tensor->_is_zerotensor() && tensor->has_storage() &&
         (tensor->numel() == 0 || tensor->data_ptr() != nullptr);
}

// Whether the memory holds the values in row-major order, without gaps.
TCH_EXTENSION_API bool tch_extension_is_plain(const at::Tensor* tensor) {
  return tch_extension_is_in_memory(tensor) && tensor->is_contiguous();
}

// Returns the tensor itself if it is plain, otherwise a plain copy.
TCH_EXTENSION_API Message tch_extension_plain(const at::Tensor* tensor, at::Tensor** result) {
  return guard([&] {
    at::Tensor plain = tensor->_is_zerotensor() ? at::zeros(tensor->sizes(), tensor->options())
                                                : tensor->resolve_conj().resolve_neg().contiguous();
    *result = new at::Tensor(std::move(plain));
  });
}

// Whether the tensor is dense: its layout is not sparse, blocked or nested, and it does not just
// represent another tensor.
TCH_EXTENSION_API bool tch_extension_is_strided(const at::Tensor* tensor) {
  return tensor->defined() && tensor->layout() == at::kStrided && !tensor->is_nested() &&
         tensor->has_storage();
}

// Tells autograd that the values change. Throws for an inference tensor outside of inference mode.
TCH_EXTENSION_API Message tch_extension_bump_version(const at::Tensor* tensor) {
  return guard([&] { tensor->unsafeGetTensorImpl()->bump_version(); });
}
