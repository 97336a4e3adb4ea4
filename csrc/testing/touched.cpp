// A recording of what some threads touch on the CPU, as if it were captured. For tests.

#include "../tensor/touched.h"

#include "../ffi.h"
#include "tch_extension/c_abi.h"

namespace tch_extension {

thread_local bool this_thread_is_captured = false;

class TouchedOnCpu final : public Touched {
 protected:
  bool is_captured(c10::Device device) override {
    return device.is_cpu() && this_thread_is_captured;
  }
  bool is_own(c10::Device, const void*) override { return false; }
};

}  // namespace tch_extension

using namespace tch_extension;

// What this thread does is captured from here on, or is not.
TCH_EXTENSION_API void tch_extension_touched_here(bool is_captured) {
  this_thread_is_captured = is_captured;
}

// The caller ends and then frees it.
TCH_EXTENSION_API Message tch_extension_touched_begin(TouchedOnCpu** result) {
  return guard([&] {
    auto touched = std::make_unique<TouchedOnCpu>();
    touched->start();
    *result = touched.release();
  });
}

TCH_EXTENSION_API Message tch_extension_touched_end(TouchedOnCpu* touched) {
  touched->stop();
  return guard([&] {
    touched->check();
    touched->is_left();
  });
}

TCH_EXTENSION_API void tch_extension_touched_free(TouchedOnCpu* touched) { delete touched; }

// Whether this tensor's memory is kept.
TCH_EXTENSION_API bool tch_extension_touched_has(const TouchedOnCpu* touched,
                                                 const at::Tensor* tensor) {
  bool has = false;
  touched->for_each_storage([&](const c10::Storage& storage) {
    has = has || storage.unsafeGetStorageImpl() == tensor->storage().unsafeGetStorageImpl();
  });
  return has;
}

TCH_EXTENSION_API bool tch_extension_touched_is_intact(const TouchedOnCpu* touched) {
  return touched->is_intact();
}

TCH_EXTENSION_API bool tch_extension_touched_is_left(TouchedOnCpu* touched) {
  return touched->is_left();
}
