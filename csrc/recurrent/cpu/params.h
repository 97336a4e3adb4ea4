// The parameters of all steps of a cell on the CPU, for double and float. cells/cell.h says what a
// cell is: it has G gates (kGates) and saves V values of a column (kSaved).
// There are T steps, the batch size is B and the hidden size is H.
#pragma once

#include "../params.h"
#include "tch_extension/kind.h"

namespace tch_extension::recurrent::cpu {

// The places with the same rows wait for one another after each step.
using Team = ::RecurrentCpuTeam;
using ForwardParams = ::RecurrentCpuForward;
using BackwardParams = ::RecurrentCpuBackward;

}  // namespace tch_extension::recurrent::cpu
