#include "../norm/backward_registers.h"

namespace tch_extension::norm {

template bool start_backward_registers<RmsNorm>(const NormBackward&, cudaStream_t);

}  // namespace tch_extension::norm
