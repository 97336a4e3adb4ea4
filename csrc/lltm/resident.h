// The ways that keep W_h on the chip: after the product with the input all steps, or all steps
// backward, in one kernel. This one uses clusters (recurrent/cluster/params.h).
#pragma once

#include "lltm.h"

namespace tch_extension {

void run_clusters(const LltmForward& call);
void run_clusters(const LltmBackward& call);

// The same by a grid or a wide grid (recurrent/grid/params.h). Returns false, and computes nothing,
// where not all blocks can run at once, because the process was limited to a part of the GPU.
bool run_grid(const LltmForward& call);
bool run_grid(const LltmBackward& call);

}  // namespace tch_extension
