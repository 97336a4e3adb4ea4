#include "../norm/forward_registers.h"

namespace tch_extension::norm {

template bool start_forward_registers<LayerNorm>(const NormForward&, cudaStream_t);

}  // namespace tch_extension::norm
