// What is specific to a GRU. Its gates are [r | z | n], as in torch.nn.GRU, and [r | z | n | hn] is
// saved: the gates after their activations, and hn = h W_hnᵀ + b_hn. cell.h has the formulas.
#pragma once

namespace tch_extension::recurrent {

struct Gru {
  static constexpr int kGates = 3;
  static constexpr int kSaved = 4;
  static constexpr int kActivated = 4;
  static constexpr int kSeparate = 1;
  static constexpr bool kStateIsH = true;
  static constexpr bool kNeedsPreviousState = true;
  static constexpr bool kHasMixedKinds = false;
};

}  // namespace tch_extension::recurrent
