// What kernels take for granted of a tensor's memory, and how to have it.

#include <ATen/ATen.h>

#include "tch_extension/c_abi.h"

using namespace tch_extension;

// Whether the values lie in memory as they are, in whatever order. libtorch also has tensors whose
// values are those in memory negated or conjugated, and tensors of zeros without memory;
// `is_contiguous` says yes to all of them. Tensors that only stand for others, as vmap's do, throw
// when they are asked for memory.
TCH_EXTENSION_API bool tch_extension_is_in_memory(const at::Tensor* tensor) {
  return tensor->defined() && tensor->layout() == at::kStrided && !tensor->is_neg() &&
         !tensor->is_conj() && !tensor->_is_zerotensor() && tensor->has_storage() &&
         (tensor->numel() == 0 || tensor->data_ptr() != nullptr);
}

// Whether they lie there row by row, too.
TCH_EXTENSION_API bool tch_extension_is_plain(const at::Tensor* tensor) {
  return tch_extension_is_in_memory(tensor) && tensor->is_contiguous();
}

// The tensor itself if it is plain, otherwise a copy that is.
TCH_EXTENSION_API Message tch_extension_plain(const at::Tensor* tensor, at::Tensor** result) {
  return guard([&] {
    at::Tensor plain = tensor->_is_zerotensor() ? at::zeros(tensor->sizes(), tensor->options())
                                                : tensor->resolve_conj().resolve_neg().contiguous();
    *result = new at::Tensor(std::move(plain));
  });
}

// Dense: not one of the sparse, blocked or nested layouts, nor one that only stands for another
// tensor.
TCH_EXTENSION_API bool tch_extension_is_strided(const at::Tensor* tensor) {
  return tensor->defined() && tensor->layout() == at::kStrided && !tensor->is_nested() &&
         tensor->has_storage();
}

// Tells autograd that the values change. Throws for an inference tensor outside of inference mode.
TCH_EXTENSION_API Message tch_extension_bump_version(const at::Tensor* tensor) {
  return guard([&] { tensor->unsafeGetTensorImpl()->bump_version(); });
}
