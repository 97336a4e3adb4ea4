// Tensors that stand for others.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

namespace tch_extension {

// Keys of tensors that stand for others: fake and subclasses, functional, batched and other
// wrappers of functorch, and those of tracers.
constexpr c10::DispatchKeySet kStandIns({
    c10::DispatchKey::Python,
    c10::DispatchKey::Fake,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::FuncTorchDynamicLayerBackMode,
    c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
    c10::DispatchKey::BatchedNestedTensor,
    c10::DispatchKey::Batched,
    c10::DispatchKey::VmapMode,
    c10::DispatchKey::Tracer,
    c10::DispatchKey::PreDispatch,
});

inline bool is_stand_in(const at::Tensor& tensor) { return tensor.key_set().has_any(kStandIns); }

}  // namespace tch_extension
