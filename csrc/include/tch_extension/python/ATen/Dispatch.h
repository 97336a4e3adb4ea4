// Stands before libtorch's header of this name, and gives back what sources of 2019 to 2021 use of
// it: AT_DISPATCH_...(x.type(), ...) and AT_CHECK.
#pragma once

#include_next <ATen/Dispatch.h>
#include <ATen/core/DeprecatedTypeProperties.h>

#ifndef AT_CHECK
#define AT_CHECK TORCH_CHECK
#endif

// The macros call a function of this very name, in this namespace; libtorch 1.5 to 2.10 had this
// overload.
namespace detail {
inline at::ScalarType scalar_type(const at::DeprecatedTypeProperties& type) {
  return type.scalarType();
}
}  // namespace detail
