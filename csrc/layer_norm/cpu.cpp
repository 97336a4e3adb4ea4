#include "../norm/finish_cpu.h"
#include "layer_norm.h"

namespace tch_extension {
inline namespace CPU_CAPABILITY {

static void layer_norm_forward(const NormForward& params, int64_t begin, int64_t end) {
  norm::run_forward<norm::LayerNorm>(params, begin, end);
}

static void layer_norm_backward(const NormBackward& params, int64_t begin, int64_t end) {
  norm::run_backward<norm::LayerNorm>(params, begin, end);
}

static void layer_norm_finish(const NormBackward& params, int64_t begin, int64_t end) {
  norm::run_finish(params, begin, end);
}

}  // namespace CPU_CAPABILITY
}  // namespace tch_extension

TCH_EXTENSION_CPU_KERNEL(tch_extension_layer_norm_forward, layer_norm_forward, NormForward,
                         tch_extension::norm::forward_items, tch_extension::norm::forward_grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_layer_norm_backward, layer_norm_backward, NormBackward,
                         tch_extension::norm::backward_items, tch_extension::norm::backward_grain)
TCH_EXTENSION_CPU_KERNEL(tch_extension_layer_norm_finish, layer_norm_finish, NormBackward,
                         tch_extension::norm::finish_items, tch_extension::norm::finish_grain)
