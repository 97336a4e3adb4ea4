// What is specific to LLTM: its number of gates. They are [i | o | g], and [σ(i) | σ(o) | g] is
// saved. cell.h describes what a cell is.
#pragma once

namespace tch_extension::recurrent {

struct Lltm {
  static constexpr int kGates = 3;
  static constexpr int kSaved = 3;
  static constexpr int kActivated = 2;
  static constexpr int kSeparate = 0;
  static constexpr bool kStateIsH = false;
  static constexpr bool kNeedsPreviousState = false;
  static constexpr bool kHasMixedKinds = true;
};

}  // namespace tch_extension::recurrent
