#include "../norm/backward_ring.h"

namespace tch_extension::norm {

template bool start_backward_ring<RmsNorm>(const NormBackward&, cudaStream_t);

}  // namespace tch_extension::norm
