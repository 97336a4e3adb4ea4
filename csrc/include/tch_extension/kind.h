// The kinds that kernels exist for, and from a kind to a type: for_kind of launch.h and cpu.h.
//
// Needs: nothing.
#pragma once

#include <cstdint>

// libtorch's numbers for element types.
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

// Calls body(Type<T>{}) for the type of a kind; for another kind, of which there is none, nothing.
// The half types have other names on the device than on the host.
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
