#include "../norm/finish_cpu.h"
#include "rms_norm.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

static void rms_norm_forward(const NormForward& params, int64_t begin, int64_t end) {
  norm::run_forward<norm::RmsNorm>(params, begin, end);
}

static void rms_norm_backward(const NormBackward& params, int64_t begin, int64_t end) {
  norm::run_backward<norm::RmsNorm>(params, begin, end);
}

static void rms_norm_finish(const NormBackward& params, int64_t begin, int64_t end) {
  norm::run_finish(params, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_rms_norm_forward, rms_norm_forward, NormForward,
                         tch_extension::norm::forward_items, tch_extension::norm::forward_grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_rms_norm_backward, rms_norm_backward, NormBackward,
                         tch_extension::norm::backward_items, tch_extension::norm::backward_grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_rms_norm_finish, rms_norm_finish, NormBackward,
                         tch_extension::norm::finish_items, tch_extension::norm::finish_grain)
