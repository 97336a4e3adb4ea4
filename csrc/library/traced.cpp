// Whether a call is traced rather than computed.

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "../autograd/stand_ins.h"
#include "../ffi.h"
#include "tch_extension/c_abi.h"

using c10::DispatchKey;
using namespace tch_extension;

// Each tensor is null or alive.
TCH_EXTENSION_API bool tch_extension_is_traced(const at::Tensor* const* tensors, size_t len) {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  if ((local.included_ - local.excluded_).has_any(kStandIns)) return true;
  if (!local.excluded_.has(DispatchKey::Python) && c10::impl::TorchDispatchModeTLS::any_modes_set())
    return true;
  for (size_t i = 0; i < len; ++i) {
    if (tensors[i] == nullptr || !tensors[i]->defined()) continue;
    if (tensors[i]->is_meta() || is_stand_in(*tensors[i])) return true;
  }
  return false;
}
