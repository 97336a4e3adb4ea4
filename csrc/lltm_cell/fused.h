// The LLTM cell in one kernel for each direction, where launches cost more than arithmetic does.
// Nothing is concatenated, no product is written to memory, and no block waits for another.
#pragma once

#include <cstdint>

#include "tch_extension/host_device.h"

namespace tch_extension {

constexpr int kWarp = 32;
constexpr unsigned int kAllLanes = 0xffffffffu;

TCH_EXTENSION_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace tch_extension
