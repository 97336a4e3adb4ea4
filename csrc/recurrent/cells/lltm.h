// What is LLTM's: its number of gates. They are [i | o | g], and what is saved of them is
// [σ(i) | σ(o) | g].
#pragma once

namespace tch_extension::recurrent {

constexpr int kGates = 3;

}  // namespace tch_extension::recurrent
