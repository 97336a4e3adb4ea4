// What is LLTM's: its number of gates. They are [i | o | g], and what is saved of them is
// [σ(i) | σ(o) | g]. cell.h describes what a cell is.
#pragma once

namespace tch_extension::recurrent {

struct Lltm {
  static constexpr int kGates = 3;
  static constexpr int kSaved = 3;
  static constexpr int kSeparate = 0;
  static constexpr bool kStateIsH = false;
  static constexpr bool kNeedsPreviousState = false;
};

// Of the kernels on CUDA, which are not generic in the cell yet.
constexpr int kGates = Lltm::kGates;

}  // namespace tch_extension::recurrent
