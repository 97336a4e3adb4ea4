// What the calls of libtorch's own layers and products have in common.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace tch_extension::recurrent {

// libtorch's numbers of the layers, which are also cuDNN's and oneDNN's.
constexpr int64_t kLstmMode = 2, kGruMode = 3;

// Disables autograd and autocast, which Rust has already done. With the dispatch keys of both
// excluded, libtorch does not check for them, which is a third of what a small product costs the
// host.
struct PlainDispatch {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

inline std::optional<at::Tensor> optional(const at::Tensor* tensor) {
  return tensor == nullptr ? std::nullopt : std::make_optional(*tensor);
}

// Hands a tensor over to the caller; null for none.
inline void give(at::Tensor tensor, at::Tensor** to) {
  *to = tensor.defined() ? std::make_unique<at::Tensor>(std::move(tensor)).release() : nullptr;
}

}  // namespace tch_extension::recurrent
