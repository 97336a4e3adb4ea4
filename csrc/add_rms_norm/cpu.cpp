#include "../norm/add_cpu.h"
#include "add_rms_norm.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

static void add_rms_norm_forward(const NormAddForward& params, int64_t begin, int64_t end) {
  norm::run_add_forward<norm::RmsNorm>(params, begin, end);
}

static void add_rms_norm_backward(const NormAddBackward& params, int64_t begin, int64_t end) {
  norm::run_add_backward<norm::RmsNorm>(params, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_add_rms_norm_forward, add_rms_norm_forward, NormAddForward,
                         tch_extension::norm::forward_items, tch_extension::norm::forward_grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_add_rms_norm_backward, add_rms_norm_backward,
                         NormAddBackward, tch_extension::norm::backward_items,
                         tch_extension::norm::backward_grain)
