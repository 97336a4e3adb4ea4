// Loops that are written out, over vectors that stay in registers: for CPU kernels with several
// sums at a time.
//
// Needs: torch's headers.
#pragma once

#include "tch_extension/cpu.h"

// For the bodies of `unrolled`: arrays become registers only when nothing takes their address.
#define TCH_EXTENSION_INLINE __attribute__((always_inline))

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// Calls body(std::integral_constant<int, 0>{}) and so on up to kCount: a loop without a loop, for
// arrays that have to become registers.
template <typename Body, int... kIndex>
inline TCH_EXTENSION_INLINE void unrolled(Body body, std::integer_sequence<int, kIndex...>) {
  (body(std::integral_constant<int, kIndex>{}), ...);
}

template <int kCount, typename Body>
inline TCH_EXTENSION_INLINE void unrolled(Body body) {
  unrolled(body, std::make_integer_sequence<int, kCount>{});
}

// Vectors that become registers. An array that is filled later does not: making it is a loop.
template <typename V, int kCount>
struct Registers {
  V values[kCount];

  V& operator[](int at) { return values[at]; }
};

template <typename V, typename Body, int... kIndex>
inline TCH_EXTENSION_INLINE auto registers(Body body, std::integer_sequence<int, kIndex...>) {
  return Registers<V, sizeof...(kIndex)>{{body(std::integral_constant<int, kIndex>{})...}};
}

// Of body(std::integral_constant<int, 0>{}) and so on.
template <typename V, int kCount, typename Body>
inline TCH_EXTENSION_INLINE auto registers(Body body) {
  return registers<V>(body, std::make_integer_sequence<int, kCount>{});
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
