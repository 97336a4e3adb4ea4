// The ways that keep W_h on the chip. After the product with the input, one kernel computes all
// steps forward, or all steps backward. run_clusters does that with clusters
// (recurrent/cluster/params.h).
#pragma once

#include "lltm.h"

namespace tch_extension {

void run_clusters(const LltmForward& call);
void run_clusters(const LltmBackward& call);

// run_grid does the same with a grid or a wide grid (recurrent/grid/params.h). It returns false,
// and computes nothing, if not all blocks can run at once, because the process was limited to a
// part of the GPU.
bool run_grid(const LltmForward& call);
bool run_grid(const LltmBackward& call);

}  // namespace tch_extension
