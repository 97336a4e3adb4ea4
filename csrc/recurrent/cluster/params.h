// A sequence of steps in one kernel, whose blocks keep the recurrent weights on the chip.
// step/params.h has the formulas.
//
// A cluster of blocks computes kRows rows of the batch for all T steps and depends on no other
// cluster: clusters run at the same time or one after another, as they fit, scheduled by the
// hardware alone. A block owns adjacent columns of h and c, with all their gates. In each step of
// the forward pass it stores its columns of h into the shared memory of the other blocks. In the
// backward pass it has the gradients for its own gates, and so a partial sum of every column of dh:
// it sends to each block the partial sums of that block's columns. Sizes are padded with zeros to
// whole tiles.
#pragma once

#include "../params.h"
#include "../scale_rows.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::cluster {

using ForwardParams = ::RecurrentClusterForward;
using BackwardParams = ::RecurrentClusterBackward;

}  // namespace tch_extension::recurrent::cluster
