// All steps behind the product with the input, and all of them back, in one kernel each: persistent.h.
#pragma once

#include "sequence.h"

namespace tch_extension {

void lltm_persistent(const LltmForward& call);
void lltm_persistent(const LltmBackward& call);

}  // namespace tch_extension
