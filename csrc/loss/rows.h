// The ways in which the kernels compute rows.
#pragma once

#include "loss.h"
#include "row.h"

namespace tch_extension::loss {

// Whether there are neither weights nor smoothing, softcap or z-loss.
inline bool is_plain(const LossRows& params) {
  return params.weight == nullptr && params.label_smoothing == 0 && params.softcap == 0 &&
         params.z_loss == 0;
}

// Starts a kernel that reads rows once, whatever their length, as far as it fits in the shared
// memory of eight multiprocessors. Starts nothing, and returns false, if the current device is no
// Hopper.
bool start_rows_in_shared_memory(const LossRows& params, cudaStream_t stream);

}  // namespace tch_extension::loss
