#include "../norm/add_forward.h"

namespace tch_extension::norm {

template bool start_add_forward<LayerNorm>(const NormAddForward&, cudaStream_t);

}  // namespace tch_extension::norm
