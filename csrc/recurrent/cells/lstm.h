// What is specific to an LSTM. Its gates are [i | f | g | o], as in torch.nn.LSTM, and all of them
// are saved after their activations. cell.h has the formulas.
#pragma once

namespace tch_extension::recurrent {

struct Lstm {
  static constexpr int kGates = 4;
  static constexpr int kSaved = 4;
  static constexpr int kActivated = 4;
  static constexpr int kSeparate = 0;
  static constexpr bool kStateIsH = false;
  static constexpr bool kNeedsPreviousState = true;
  static constexpr bool kHasMixedKinds = false;
};

}  // namespace tch_extension::recurrent
