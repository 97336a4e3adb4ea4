// All steps behind the product with the input, and all of them back, in one kernel each: persistent.h.
#pragma once

#include "sequence.h"

namespace tch_extension {

void lltm_persistent(const LltmForward& call);
void lltm_persistent(const LltmBackward& call);

// The same by grid.h. Returns false, and computes nothing, where the GPU has no room for all blocks at once,
// because another process has a part of it.
bool lltm_grid(const LltmForward& call);
bool lltm_grid(const LltmBackward& call);

}  // namespace tch_extension
