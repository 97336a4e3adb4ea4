// Accessors of tensors, for C++ code that has an at::Tensor. A kernel only needs accessor.h.
//
//   scale<<<...>>>(accessor<const float, 2>(x, "x"), accessor<float, 2>(y, "y"));
//   accessor<at::Half, 2>(x, "x").as<__half>()  // __half is the type's name on the device
//
// A tensor with another number of dimensions, kind or layout than requested causes a c10::Error.
//
// Needs: torch's headers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <type_traits>

#include "tch_extension/accessor.h"

namespace tch_extension {

// T may be const. Then the memory of a lazy clone stays shared.
template <typename T, int N>
Accessor<T, N> accessor(const at::Tensor& tensor, const char* name) {
  using Value = std::remove_const_t<T>;
  constexpr auto kKind = c10::CppTypeToScalarType<Value>::value;
  TORCH_CHECK(tensor.defined(), name, ": expected a tensor, got none");
  TORCH_CHECK(tensor.layout() == at::kStrided, name,
              ": expected a dense tensor, got one of layout ", tensor.layout());
  TORCH_CHECK(tensor.scalar_type() == kKind, name, ": expected ", kKind, ", got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.dim() == N, name, ": expected ", N, " dimensions, got shape ", tensor.sizes());
  T* data;
  if constexpr (std::is_const_v<T>) {
    data = tensor.const_data_ptr<Value>();
  } else {
    data = tensor.mutable_data_ptr<Value>();
  }
  return make_accessor<N>(data, tensor.sizes().data(), tensor.strides().data());
}

}  // namespace tch_extension
