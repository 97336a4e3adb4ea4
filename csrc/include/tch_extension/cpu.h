// CPU kernels that use libtorch's vector library. They are compiled once for each instruction set,
// and the program chooses one when it runs.
//
// A `cpu.cpp` defines, in namespace tch_extension::CPU_CAPABILITY, a function that works on a range
// of items:
//
//   void scale(const ScaleParams& params, int64_t begin, int64_t end);
//
// and ends with
//
//   TCH_EXTENSION_CPU_KERNEL(my_crate_scale, scale, ScaleParams, scale_items, scale_grain)
//
// which defines `extern "C" void my_crate_scale_cpu(const ScaleParams*)`. That function picks the
// copy for the best instruction set, cuts scale_items(params) items into ranges of at least
// scale_grain(params) items, and spreads them over libtorch's threads.
//
// With TCH_EXTENSION_ISAS=native (see tch-extension-build), there is one instruction set to pick,
// and a program that starts on a CPU without it says so and ends.
//
// Everything in such a file must be in that namespace or `static`. The linker would merge inline
// functions outside of it across the copies, and an old CPU might run the AVX-512 version.
//
// Needs: torch's headers.
#pragma once

#include <ATen/OpMathType.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "tch_extension/kind.h"

#define TCH_EXTENSION_CONCAT_(a, b) a##b
#define TCH_EXTENSION_CONCAT(a, b) TCH_EXTENSION_CONCAT_(a, b)

#if defined(CPU_CAPABILITY_DEFAULT)
#include <ATen/Parallel.h>
#include <ATen/Version.h>

#if defined(TCH_EXTENSION_ONLY_ISA)
#include <cstdio>
#include <cstdlib>
#else
#include <string>
#endif

namespace tch_extension {

#if defined(TCH_EXTENSION_ONLY_ISA)

// The kernels' own conditions, without which they would end in an illegal instruction.
#define TCH_EXTENSION_CPU_HAS_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define TCH_EXTENSION_CPU_HAS_AVX512                                           \
  (TCH_EXTENSION_CPU_HAS_AVX2 && __builtin_cpu_supports("avx512f") &&          \
   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && \
   __builtin_cpu_supports("avx512dq"))
#define TCH_EXTENSION_TEXT_(a) #a
#define TCH_EXTENSION_TEXT(a) TCH_EXTENSION_TEXT_(a)

// Is computed when the program is loaded.
[[maybe_unused]] const bool kHasOnlyIsa = [] {
  __builtin_cpu_init();
  if (TCH_EXTENSION_CONCAT(TCH_EXTENSION_CPU_HAS_, TCH_EXTENSION_ONLY_ISA)) return true;
  std::fputs("error: this program's kernels were compiled for " TCH_EXTENSION_TEXT(
                 TCH_EXTENSION_ONLY_ISA) " only (TCH_EXTENSION_ISAS=native), which this CPU lacks; "
             "build it here after `cargo clean`, or without that variable\n",
             stderr);
  std::_Exit(1);
}();

#else

// 0: default, 1: AVX2, 2: AVX-512. It is what libtorch itself uses, so ATEN_CPU_CAPABILITY has an
// effect.
inline int cpu_capability() {
  static const int capability = [] {
    const std::string name = at::get_cpu_capability();
    return name == "AVX512" ? 2 : name == "AVX2" ? 1 : 0;
  }();
  return capability;
}

#endif

}  // namespace tch_extension
#endif

namespace tch_extension {
inline namespace CPU_CAPABILITY {

// The type in which values of type T are computed: float for the half kinds, T itself otherwise.
template <typename T>
using Compute = at::opmath_type<T>;

// Calls body(Type<T>{}) with the element type of a kind.
template <typename Body>
inline void for_kind(int32_t kind, Body&& body) {
  dispatch_kind<at::Half, at::BFloat16>(kind, std::forward<Body>(body));
}

template <typename T>
using Vec = at::vec::Vectorized<T>;

// The largest number of values that `load` and `store` take.
template <typename T>
constexpr int64_t kVecSize = Vec<Compute<T>>::size();

// Loads the first `count` values at `from`, and fills the rest of the vector with zeros.
template <typename T>
inline Vec<Compute<T>> load(const T* from, int64_t count) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    return Vec<T>::loadu(from, count);
  } else {
    T padded[kVecSize<T>];
    if (count < kVecSize<T>) {
      std::fill(std::copy_n(from, count, padded), padded + kVecSize<T>, T(0));
      from = padded;
    }
    Vec<float> values;
    at::vec::load_to_float<T>(from, values);
    return values;
  }
}

// Rounds two vectors to T and stores them. For the half kinds, this costs less than two calls of
// `store`.
template <typename T>
inline void store_pair(const Vec<Compute<T>>& first, const Vec<Compute<T>>& second, T* to) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    first.store(to);
    second.store(to + kVecSize<T>);
  } else {
    at::vec::convert_from_float<T>(first, second).store(to);
  }
}

// Rounds to T and stores the first `count` values.
template <typename T>
inline void store(const Vec<Compute<T>>& values, T* to, int64_t count) {
  if constexpr (std::is_same_v<T, Compute<T>>) {
    values.store(to, count);
  } else {
    at::vec::convert_from_float<T>(values, values).store(to, count);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

// noexcept, because the caller may be Rust, which no exception must reach.
#define TCH_EXTENSION_CPU_UNIT(symbol, name, Params)                                          \
  extern "C" void TCH_EXTENSION_CONCAT(symbol##_, CPU_CAPABILITY)(const Params*, int64_t,     \
                                                                  int64_t) noexcept;          \
  extern "C" __attribute__((visibility("hidden"))) void TCH_EXTENSION_CONCAT(                 \
      symbol##_, CPU_CAPABILITY)(const Params* params, int64_t begin, int64_t end) noexcept { \
    tch_extension::CPU_CAPABILITY::name(*params, begin, end);                                 \
  }

#if defined(TCH_EXTENSION_ONLY_ISA)
// Another copy has the kernel. `name` is mentioned, so that there is no warning about an unused
// function.
#define TCH_EXTENSION_CPU_KERNEL(symbol, name, Params, items, grain)                              \
  extern "C" void TCH_EXTENSION_CONCAT(symbol##_, TCH_EXTENSION_ONLY_ISA)(const Params*, int64_t, \
                                                                          int64_t) noexcept;      \
  extern "C" void symbol##_cpu(const Params* params) noexcept {                                   \
    using namespace tch_extension::CPU_CAPABILITY;                                                \
    static_assert(sizeof(name(Params{}, 0, 0), 0) > 0, "");                                       \
    at::parallel_for(0, items(*params), grain(*params), [&](int64_t begin, int64_t end) {         \
      TCH_EXTENSION_CONCAT(symbol##_, TCH_EXTENSION_ONLY_ISA)(params, begin, end);                \
    });                                                                                           \
  }
#elif defined(CPU_CAPABILITY_DEFAULT)
#define TCH_EXTENSION_CPU_KERNEL(symbol, name, Params, items, grain)                 \
  TCH_EXTENSION_CPU_UNIT(symbol, name, Params)                                       \
  extern "C" void symbol##_AVX2(const Params*, int64_t, int64_t) noexcept;           \
  extern "C" void symbol##_AVX512(const Params*, int64_t, int64_t) noexcept;         \
  extern "C" void symbol##_cpu(const Params* params) noexcept {                      \
    using Unit = void (*)(const Params*, int64_t, int64_t) noexcept;                 \
    constexpr Unit units[] = {symbol##_DEFAULT, symbol##_AVX2, symbol##_AVX512};     \
    const Unit unit = units[tch_extension::cpu_capability()];                        \
    using namespace tch_extension::CPU_CAPABILITY;                                   \
    at::parallel_for(0, items(*params), grain(*params),                              \
                     [&](int64_t begin, int64_t end) { unit(params, begin, end); }); \
  }
#else
// Other copies than the default mention `items` and `grain` here, which only the default copy
// calls, so that there is no warning about unused functions.
#define TCH_EXTENSION_CPU_KERNEL(symbol, name, Params, items, grain)             \
  TCH_EXTENSION_CPU_UNIT(symbol, name, Params)                                   \
  namespace tch_extension {                                                      \
  inline namespace CPU_CAPABILITY {                                              \
  static_assert(sizeof(items(Params{})) > 0 && sizeof(grain(Params{})) > 0, ""); \
  }                                                                              \
  }
#endif
