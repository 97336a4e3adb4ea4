// A whole layer in one kernel a direction, for a layer that is so small that launches, and not its
// operations, take the time.
//
// A block computes whole rows of the batch, one after another, for all T steps, with the product
// with the input. It has kParts threads for a column of h, each with a part of the column's weights
// in its registers: the sum over a column's parts is a shuffle, and h passes from step to step
// through shared memory. The backward pass also has the gradients of the weights in registers, as
// far as they have room, which a second kernel sums over blocks. So a call forward is one kernel,
// and a call backward is two. Without room for them the gates' gradients are written for products.
// step/params.h has the formulas.
#pragma once

#include "../params.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::block {

using ForwardParams = ::RecurrentBlockForward;
using BackwardParams = ::RecurrentBlockBackward;

}  // namespace tch_extension::recurrent::block
