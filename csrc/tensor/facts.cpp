// One call that answers all the questions of an operator's checks and launches about its tensors,
// and one that makes its outputs. Separate questions would cost more host time than the launch of a
// small kernel.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#ifdef TCH_EXTENSION_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <sstream>

#include "../autograd/stand_ins.h"
#include "../ffi.h"
#include "tch_extension/c_abi.h"
#include "touched.h"

using namespace tch_extension;

constexpr int kMostDims = 4;

// src/ffi/facts.rs mirrors these, and a test compares sizes and offsets.
struct tch_extension::TensorFacts {
  const void* data;  // the first element's address; null if there is none or it is not in memory
  int64_t sizes[kMostDims];    // of the first kMostDims dimensions
  int64_t strides[kMostDims];  // in elements
  int32_t dim;                 // -1: no tensor, or not a dense one
  int32_t kind;                // a c10::ScalarType
  int32_t device;              // the index of a CUDA device, kCpu or kOtherDevice
  bool is_in_memory;           // the memory holds the values themselves, in any order
  bool requires_grad;
};

struct tch_extension::TensorSize {
  int64_t sizes[kMostDims];
  int32_t dim;  // -1: no tensor is wanted
};

namespace {

constexpr int32_t kCpu = -1, kOtherDevice = -2;

TensorFacts facts_of(const at::Tensor* tensor) {
  TensorFacts facts{};
  facts.dim = -1;
  if (tensor == nullptr || !tensor->defined() || tensor->layout() != at::kStrided ||
      tensor->is_nested() || !tensor->has_storage()) {
    return facts;
  }
  facts.dim = static_cast<int32_t>(tensor->dim());
  facts.kind = static_cast<int32_t>(tensor->scalar_type());
  facts.device = tensor->is_cuda() ? tensor->get_device() : tensor->is_cpu() ? kCpu : kOtherDevice;
  const auto sizes = tensor->sizes(), strides = tensor->strides();
  for (int dim = 0; dim < std::min(facts.dim, kMostDims); ++dim) {
    facts.sizes[dim] = sizes[dim];
    facts.strides[dim] = strides[dim];
  }
  facts.requires_grad = tensor->requires_grad();
  // The same condition as in tch_extension_is_in_memory.
  if (tensor->is_neg() || tensor->is_conj() || tensor->_is_zerotensor()) return facts;
  touch(*tensor);
  facts.data = tensor->const_data_ptr();
  facts.is_in_memory = facts.data != nullptr || tensor->numel() == 0;
  return facts;
}

// Makes the same tensor as at::empty, without a call through the dispatcher.
at::Tensor empty(const TensorSize& size, at::ScalarType kind, int32_t device) {
  const at::IntArrayRef sizes(size.sizes, size.dim);
  if (device == kCpu) return at::detail::empty_cpu(sizes, kind);
#ifdef TCH_EXTENSION_CUDA
  return at::detail::empty_cuda(
      sizes, kind, at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)), std::nullopt);
#else
  TORCH_CHECK(false, "this build has no CUDA");
#endif
}

}  // namespace

// `tensors` has `len` entries, which may be null.
TCH_EXTENSION_API Message tch_extension_facts(const at::Tensor* const* tensors, size_t len,
                                              TensorFacts* facts) {
  return guard([&] {
    for (size_t i = 0; i < len; ++i) facts[i] = facts_of(tensors[i]);
  });
}

// Makes new tensors of one kind and device, row-major and uninitialised, and returns their
// addresses. `tensors` has room for `len` pointers; on success the caller owns them, and an entry
// is null if no tensor was wanted. On failure they are not written.
TCH_EXTENSION_API Message tch_extension_empty(const TensorSize* sizes, size_t len, int32_t kind,
                                              int32_t device, at::Tensor** tensors, void** data) {
  return guard([&] {
    c10::SmallVector<std::unique_ptr<at::Tensor>, 8> made;
    made.resize(len);
    for (size_t i = 0; i < len; ++i) {
      if (sizes[i].dim < 0) continue;
      made[i] =
          std::make_unique<at::Tensor>(empty(sizes[i], static_cast<at::ScalarType>(kind), device));
      data[i] = made[i]->mutable_data_ptr();
    }
    for (size_t i = 0; i < len; ++i) tensors[i] = made[i].release();
  });
}

// What a message says of a tensor that a kernel cannot take. Only the tensor itself is asked,
// because to print a wrapper of torch.func's would call torch.func. The caller frees the text like
// a message.
TCH_EXTENSION_API char* tch_extension_describe(const at::Tensor* tensor) {
  try {
    std::ostringstream text;
    if (is_stand_in(*tensor)) text << "a tensor that stands for others, of ";
    text << tensor->scalar_type();
    if (!tensor->key_set().has(c10::DispatchKey::Python))
      text << ' ' << tensor->sym_sizes() << " on " << tensor->device();
    return strdup(text.str().c_str());
  } catch (...) {
    return strdup("another tensor");
  }
}

// The layout of these structs, which a test compares with their Rust mirrors.
extern "C" const size_t tch_extension_facts_layout[12] = {
    sizeof(TensorFacts),
    offsetof(TensorFacts, data),
    offsetof(TensorFacts, sizes),
    offsetof(TensorFacts, strides),
    offsetof(TensorFacts, dim),
    offsetof(TensorFacts, kind),
    offsetof(TensorFacts, device),
    offsetof(TensorFacts, is_in_memory),
    offsetof(TensorFacts, requires_grad),
    sizeof(TensorSize),
    offsetof(TensorSize, sizes),
    offsetof(TensorSize, dim),
};
