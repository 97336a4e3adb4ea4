// All steps behind the product with the input, and all of them back, in one kernel each:
// cluster/params.h.
#pragma once

#include "lltm.h"

namespace tch_extension {

void lltm_persistent(const LltmForward& call);
void lltm_persistent(const LltmBackward& call);

// The same by grid/params.h. Returns false, and computes nothing, where not all blocks can run at
// once, because the process was limited to a part of the GPU.
bool lltm_grid(const LltmForward& call);
bool lltm_grid(const LltmBackward& call);

}  // namespace tch_extension
