// The parameters of one step that is computed by kernels of its own.
//
// These are for whole sequences of a recurrent cell (cells/cell.h). The product with the input is
// computed for all steps at once before the first step. Each step then computes the product with
// the preceding step's h, and the cell.
//
// There are T steps, the batch size is B and the hidden size is H. All arrays are row-major and
// contiguous unless stated otherwise. There are three kinds: the product's kind is that of its
// operands; the state's kind is that of what is kept and returned; and the gates' kind is the one
// in which sums are computed, which is double if the product's is double, and float otherwise. On
// the CPU all three are the same. G, V and S are a cell's numbers of gates, of saved values and of
// separate gates.
#pragma once

#include "../params.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::step {

using ForwardParams = ::RecurrentStepForward;
using BackwardParams = ::RecurrentStepBackward;

}  // namespace tch_extension::recurrent::step
