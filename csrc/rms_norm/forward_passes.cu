#include "../norm/forward_passes.h"

namespace tch_extension::norm {

template bool start_forward_passes<RmsNorm>(const NormForward&, cudaStream_t);

}  // namespace tch_extension::norm
