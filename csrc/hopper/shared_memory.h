// Addresses in shared memory. PTX takes them as 32-bit numbers.
#pragma once

#include <cstdint>

namespace tch_extension::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace tch_extension::hopper
