// The compiler finds this header before libtorch's of the same name. It includes libtorch's, and
// adds what sources from 2019 to 2021 use: AT_DISPATCH_...(x.type(), ...) and AT_CHECK.
#pragma once

#include_next <ATen/Dispatch.h>
#include <ATen/core/DeprecatedTypeProperties.h>

#ifndef AT_CHECK
#define AT_CHECK TORCH_CHECK
#endif

// The macros call a function of exactly this name in this namespace. libtorch 1.5 to 2.10 had this
// overload.
namespace detail {
inline at::ScalarType scalar_type(const at::DeprecatedTypeProperties& type) {
  return type.scalarType();
}
}  // namespace detail
