// Unrolled loops over vectors that stay in registers, for CPU kernels that compute several sums at
// a time.
//
// Needs: torch's headers.
#pragma once

#include "tch_extension/cpu.h"

// For the bodies of `unrolled`, because an array stays in registers only if nothing takes its
// address.
#define TCH_EXTENSION_INLINE __attribute__((always_inline))

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// Calls body(std::integral_constant<int, 0>{}) and so on, kCount times. The loop is unrolled at
// compile time, so that arrays can stay in registers.
template <typename Body, int... kIndex>
inline TCH_EXTENSION_INLINE void unrolled(Body body, std::integer_sequence<int, kIndex...>) {
  (body(std::integral_constant<int, kIndex>{}), ...);
}

template <int kCount, typename Body>
inline TCH_EXTENSION_INLINE void unrolled(Body body) {
  unrolled(body, std::make_integer_sequence<int, kCount>{});
}

// An array of vectors that stays in registers. It must be made in one expression: an array that is
// filled later is first constructed by a loop, and stays in memory.
template <typename V, int kCount>
struct Registers {
  V values[kCount];

  V& operator[](int at) { return values[at]; }
};

template <typename V, typename Body, int... kIndex>
inline TCH_EXTENSION_INLINE auto registers(Body body, std::integer_sequence<int, kIndex...>) {
  return Registers<V, sizeof...(kIndex)>{{body(std::integral_constant<int, kIndex>{})...}};
}

// Makes the array of the kCount results of body(std::integral_constant<int, 0>{}) and so on.
template <typename V, int kCount, typename Body>
inline TCH_EXTENSION_INLINE auto registers(Body body) {
  return registers<V>(body, std::make_integer_sequence<int, kCount>{});
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension
