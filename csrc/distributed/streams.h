// Memory that an operation started on one stream uses on another one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace tch_extension {

// Keeps the memory of a tensor that is about to be freed until the current stream has done its work
// so far. The tensor may have been made on another stream, to which the allocator would return the
// memory at once.
inline void use_on_current_stream(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const auto* device = c10::impl::getDeviceGuardImpl(tensor.device().type());
  tensor.record_stream(device->getStream(tensor.device()));
}

}  // namespace tch_extension
