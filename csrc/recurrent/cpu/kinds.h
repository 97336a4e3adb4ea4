// The type in which the CPU computes a sequence.
#pragma once

#include "tch_extension/cpu.h"

namespace tch_extension::recurrent {
inline namespace CPU_CAPABILITY {
namespace {

// On the CPU the half kinds are computed as float from end to end.
template <typename Body>
void for_kind_of_sums(int32_t kind, Body body) {
  kind == kTchExtensionDouble ? body(Type<double>{}) : body(Type<float>{});
}

}  // namespace
}  // namespace CPU_CAPABILITY
}  // namespace tch_extension::recurrent
