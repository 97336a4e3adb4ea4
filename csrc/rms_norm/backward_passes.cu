#include "../norm/backward_passes.h"

namespace tch_extension::norm {

template bool start_backward_passes<RmsNorm>(const NormBackward&, cudaStream_t);

}  // namespace tch_extension::norm
