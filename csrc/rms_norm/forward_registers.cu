#include "../norm/forward_registers.h"

namespace tch_extension::norm {

template bool start_forward_registers<RmsNorm>(const NormForward&, cudaStream_t);

}  // namespace tch_extension::norm
