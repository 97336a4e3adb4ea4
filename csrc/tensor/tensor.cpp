// Whether a tensor's memory is as kernels need it, and how to get such a tensor.

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include "../ffi.h"
#include "tch_extension/c_abi.h"
#include "touched.h"

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

// Whether the tensor is plain, of this kind and on this device, the index of a CUDA device or -1
// for the CPU; and whether it has these sizes or, if they are null, `len` elements. Then `data`
// becomes the address of its first element. One call, because a kernel has many tensors.
TCH_EXTENSION_API bool tch_extension_array(const at::Tensor* tensor, int32_t kind, int32_t device,
                                           const int64_t* sizes, size_t len, void** data) {
  try {
    const bool is_there =
        device < 0 ? tensor->is_cpu() : tensor->is_cuda() && tensor->get_device() == device;
    if (!is_there || static_cast<int32_t>(tensor->scalar_type()) != kind ||
        !tch_extension_is_plain(tensor)) {
      return false;
    }
    const bool fits = sizes != nullptr ? tensor->sizes() == at::IntArrayRef(sizes, len)
                                       : static_cast<size_t>(tensor->numel()) == len;
    if (!fits) return false;
    touch(*tensor);
    *data = tensor->mutable_data_ptr();
    return true;
  } catch (...) {
    return false;
  }
}

// Whether the tensor has these sizes and strides, and its first element this address.
TCH_EXTENSION_API bool tch_extension_is_at(const at::Tensor* tensor, const void* data,
                                           const int64_t* sizes, const int64_t* strides,
                                           size_t dim) {
  try {
    return tensor->const_data_ptr() == data && tensor->sizes() == at::IntArrayRef(sizes, dim) &&
           tensor->strides() == at::IntArrayRef(strides, dim);
  } catch (...) {
    return false;
  }
}

TCH_EXTENSION_API void tch_extension_touch(const at::Tensor* tensor) { touch(*tensor); }

// Returns the tensor itself if it is plain, otherwise a plain copy.
TCH_EXTENSION_API Message tch_extension_plain(const at::Tensor* tensor, at::Tensor** result) {
  return guard([&] {
    // What `resolve_conj().resolve_neg().contiguous()` finds out by three calls of the dispatcher.
    if (!tensor->is_conj() && !tensor->is_neg() && !tensor->_is_zerotensor() &&
        tensor->is_contiguous()) {
      *result = new at::Tensor(*tensor);
      return;
    }
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

// What checks ask most. tch has functions for it, too, but each of them also asks whether there was
// an error, which costs more than the question itself. Where libtorch cannot answer, the answer is
// no, and the check refuses the tensor.

// libtorch's number of the kind; -1 for an undefined tensor.
TCH_EXTENSION_API int32_t tch_extension_scalar_type(const at::Tensor* tensor) {
  return tensor->defined() ? static_cast<int32_t>(tensor->scalar_type()) : -1;
}

TCH_EXTENSION_API bool tch_extension_has_shape(const at::Tensor* tensor, const int64_t* sizes,
                                               size_t len) {
  try {
    return tensor->defined() && tensor->sizes() == at::IntArrayRef(sizes, len);
  } catch (...) {
    return false;
  }
}

TCH_EXTENSION_API bool tch_extension_is_contiguous(const at::Tensor* tensor) {
  try {
    return tensor->defined() && tensor->is_contiguous();
  } catch (...) {
    return false;
  }
}

TCH_EXTENSION_API bool tch_extension_same_device(const at::Tensor* one, const at::Tensor* other) {
  try {
    return one->defined() && other->defined() && one->device() == other->device();
  } catch (...) {
    return false;
  }
}

// Tells autograd that the values change. Throws for an inference tensor outside of inference mode.
TCH_EXTENSION_API Message tch_extension_bump_version(const at::Tensor* tensor) {
  return guard([&] { tensor->unsafeGetTensorImpl()->bump_version(); });
}
