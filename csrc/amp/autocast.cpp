// libtorch's autocast: settings for each thread and device type, and one cache of cast weights for
// all of them.

#include <ATen/autocast_mode.h>

#include <utility>

#include "../ffi.h"
#include "tch_extension/c_abi.h"

using namespace tch_extension;

struct tch_extension::AutocastSetting {
  int32_t kind;  // a c10::ScalarType
  bool enabled;
};

namespace {

at::DeviceType device_type(bool cuda) { return cuda ? at::kCUDA : at::kCPU; }

}  // namespace

TCH_EXTENSION_API Message tch_extension_autocast_get(bool cuda, AutocastSetting* result) {
  return guard([&] {
    const auto device = device_type(cuda);
    *result = {static_cast<int32_t>(at::autocast::get_autocast_dtype(device)),
               at::autocast::is_autocast_enabled(device)};
  });
}

TCH_EXTENSION_API Message tch_extension_autocast_set(bool cuda, const AutocastSetting* setting) {
  return guard([&] {
    at::autocast::set_autocast_dtype(device_type(cuda), static_cast<at::ScalarType>(setting->kind));
    at::autocast::set_autocast_enabled(device_type(cuda), setting->enabled);
  });
}

TCH_EXTENSION_API bool tch_extension_autocast_cache() {
  return at::autocast::is_autocast_cache_enabled();
}

TCH_EXTENSION_API void tch_extension_autocast_enter() { at::autocast::increment_nesting(); }

// When the last nested autocast region ends, the cached casts of weights are freed.
TCH_EXTENSION_API Message tch_extension_autocast_leave() {
  return guard([&] {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  });
}

// Frees the cached casts of weights.
TCH_EXTENSION_API Message tch_extension_autocast_clear() {
  return guard([] { at::autocast::clear_cache(); });
}

// Casts the tensor to another kind if autocast would cast it. The cast of a leaf that requires grad
// is kept in the cache.
TCH_EXTENSION_API Message tch_extension_cached_cast(const at::Tensor* tensor, int32_t kind,
                                                    bool cuda, at::Tensor** result) {
  return guard([&] {
    at::Tensor cast =
        at::autocast::cached_cast(static_cast<at::ScalarType>(kind), *tensor, device_type(cuda));
    *result = new at::Tensor(std::move(cast));
  });
}
