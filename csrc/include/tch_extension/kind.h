// The kinds that kernels exist for. for_kind in launch.h and in cpu.h maps a kind to a type.
//
// Needs: nothing.
#pragma once

#include <cstdint>

// libtorch's numbers of the element types.
enum TchExtensionKind : int32_t {
  kTchExtensionHalf = 5,
  kTchExtensionFloat = 6,
  kTchExtensionDouble = 7,
  kTchExtensionBFloat16 = 15,
};

namespace tch_extension {

template <typename T>
struct Type {
  using type = T;
};

// Calls body(Type<T>{}) with the element type of a kind. It does nothing for a kind that is not
// listed. The half types are parameters because they have other names on the device than on the
// host.
template <typename Half, typename BFloat16, typename Body>
inline void dispatch_kind(int32_t kind, Body&& body) {
  switch (kind) {
    case kTchExtensionHalf:
      return body(Type<Half>{});
    case kTchExtensionFloat:
      return body(Type<float>{});
    case kTchExtensionDouble:
      return body(Type<double>{});
    case kTchExtensionBFloat16:
      return body(Type<BFloat16>{});
  }
}

}  // namespace tch_extension
